"""What the manager does at each turn beside messages: the rollouts decide."""

from sqlalchemy.orm import Session


def decide(session: Session, now: float) -> None:
    """Let every running rollout decide; see `control_loop.Decide`."""
