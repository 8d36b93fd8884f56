"""The sender of a request and its permissions: scopes, and roles as sets of scopes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from edgekit_runtime.errors import RequestError

Scope = Literal["read", "release", "rollout", "evidence", "device", "sample", "admin"]
"""What a principal may do.

`read`: See everything except users, tokens and samples.
`release`: Create and withdraw releases.
`rollout`: Start rollouts and give orders to them.
`evidence`: Add evidence to a rollout that has declared a gate for it.
`device`: Invite, tag and revoke devices.
`sample`: Order, see and delete samples.
`admin`: Manage users, tokens and webhooks.
"""

Role = Literal["viewer", "operator", "admin"]

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
SCOPES_OF_ROLE: Final[Mapping[Role, frozenset[Scope]]] = {
    "viewer": frozenset({"read"}),
    "operator": frozenset({"read", "release", "rollout", "evidence", "device", "sample"}),
    "admin": frozenset(SCOPES),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A user, a token, or somebody with access to the fleet's folder.

    Attributes:
        name: The actor in the audit log, which is the name of a user or `token:NAME`.
        scopes: The permissions.
    """

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes

    def require(self, scope: Scope) -> None:
        """Check that the principal has a scope.

        Raises:
            RequestError: 403, the principal lacks the scope.
        """
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes)) or "none"
            raise RequestError(
                403, f"{self.name} lacks the scope '{scope}', and has {has}; ask an administrator"
            )


def folder_owner(name: str) -> Principal:
    """Return a principal with all scopes, for somebody with access to the fleet's folder."""
    return Principal(name, frozenset(SCOPES))
