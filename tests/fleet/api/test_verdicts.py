"""Verdicts and outside evidence over HTTP and on the command line, with tokens that may do little."""

import json
from typing import Any

import pytest
from sqlalchemy import select
from tests.fleet.api.conftest import Api
from tests.fleet.test_rollouts import Fleet, add_devices, add_release, succeed
from tests.toolkit.cases import cases

from edgekit_cli.cli import main
from edgekit_fleet.access.failure_limit import MAX_FAILURES
from edgekit_fleet.rollouts.runner import read_entries
from edgekit_fleet.store.tables import AuditRow

GATES = {"conversion": {"limit": 2.0, "unit": "% lost", "judge": "token:shop"}, "complaints": {}}
START = {"release": "r", "selector": "name=d0*", "waves": "2,100%"}


def start(api: Api, name: str, **fields: Any) -> Fleet:
    fleet = Fleet(api.store, name)
    assert api.post("/rollouts", {**START, "name": name, **fields}).status == 201
    return fleet


@pytest.fixture
def rollout(api: Api) -> Fleet:
    add_devices(api.store, 6)
    add_release(api.store)
    return start(api, "a", evidence=GATES)


def test_token_of_a_judge_adds_evidence_and_nothing_else(api: Api, rollout: Fleet) -> None:
    token = api.make_token("shop", "evidence")
    answer = api.post("/rollouts/a/evidence", {"gate": "conversion", "value": 1.5}, token)
    assert (answer.status, answer.json["outcome"]) == (201, "pass")
    assert api.get("/rollouts/a/verdict", token).status == 403
    assert api.post("/rollouts/a/orders", {"order": "abort"}, token).status == 403
    assert api.post("/rollouts", {**START, "name": "b"}, token).status == 403
    reader = api.make_token("reader", "read", "rollout")
    assert api.post("/rollouts/a/evidence", {"gate": "complaints", "statement": "pass"}, reader).status == 403
    with api.store.snapshot() as session:
        actors = session.scalars(select(AuditRow.actor).where(AuditRow.subject == "a")).all()
    assert actors == ["token:tests", "token:shop"]


def test_repeated_evidence_counts_once(api: Api, rollout: Fleet) -> None:
    body = {"gate": "complaints", "statement": "pass"}
    answers = [api.post("/rollouts/a/evidence", body, idempotency_key="k1") for _ in range(3)]
    assert {answer.status for answer in answers} == {201} and len({answer.data for answer in answers}) == 1
    with api.store.snapshot() as session:
        assert len(read_entries(session, "a")) == 2


@pytest.fixture
def token(api: Api) -> str:
    return api.make_token("other", "evidence")


@cases(
    ("path", "body", "status"),
    [
        ("a", '{"gate": "conversion", "value": NaN}', 400),
        ("a", '{"gate": "conversion", "value": 1e300}', 422),
        ("a", '{"gate": "conversion", "value": -1e999}', 422),
        ("a", '{"gate": "conversion", "value": 1, "samples": -1}', 422),
        ("a", '{"gate": "complaints", "statement": "maybe"}', 422),
        ("a", '{"gate": "complaints", "statement": "pass", "who": "token:shop"}', 422),
        ("a", '{"gate": "complaints"}', 409),
        ("a", '{"gate": "latency", "statement": "stop"}', 409),
        ("a", '{"gate": "conversion", "value": 1}', 409),  # by another token than the judge's
        ("none", '{"gate": "complaints", "statement": "stop"}', 404),
    ],
)
def test_hostile_evidence_is_refused(
    api: Api, rollout: Fleet, token: str, path: str, body: str, status: int
) -> None:
    answer = api.send(
        "POST",
        f"/rollouts/{path}/evidence",
        body.encode(),
        authorization=f"Bearer {token}",
        content_type="application/json",
    )
    assert answer.status == (status)
    assert answer.headers["content-type"] == "application/problem+json"


def test_flood_of_evidence_is_refused(api: Api, rollout: Fleet) -> None:
    body = {"gate": "complaints", "statement": "pass", "reason": "x" * 5000}
    statuses = [api.post("/rollouts/a/evidence", body).status for _ in range(MAX_FAILURES + 5)]
    assert statuses[:MAX_FAILURES] == [201] * MAX_FAILURES and 429 in statuses[MAX_FAILURES:]
    stop = {"gate": "complaints", "statement": "stop"}
    assert api.post("/rollouts/a/evidence", stop, api.make_token("other", "evidence")).status == 201


@cases(
    "gates",
    [
        {"latency": {}},
        {"a b": {}},
        {"x": {"limit": "high"}},
        {"x": {"deadline_s": -1}},
        {f"g{number}": {} for number in range(17)},
    ],
)
def test_malformed_gate_starts_no_rollout(api: Api, rollout: Fleet, gates: dict[str, Any]) -> None:
    answer = api.post("/rollouts", {**START, "name": "b", "evidence": gates})
    assert answer.status in (409, 422) and answer.json["detail"]
    assert api.get("/rollouts/b").status == 404


def test_verdict_waits_until_it_is_decided_and_goes_to_webhooks(api: Api, rollout: Fleet) -> None:
    rollout.run(succeed)
    undecided = api.get("/rollouts/a/verdict?wait=0.05").json
    assert undecided["verdict"] == "undecided" and "complaints, conversion" in undecided["reasons"][0]
    body = {"gate": "complaints", "statement": "stop", "reason": "<script>alert(1)</script>"}
    assert api.post("/rollouts/a/evidence", body).status == 201
    rollout.run(succeed)
    verdict = api.get("/rollouts/a/verdict?wait=60").json
    assert verdict["verdict"] == "stop" and "complaints: stop by token:tests" in verdict["reasons"][0]
    (entry,) = api.get("/audit?action=rollout.verdict").json["items"]  # what a webhook is sent
    assert entry["subject"] == "a" and entry["detail"]["verdict"] == "stop"
    assert api.post("/rollouts/a/evidence", body).status == 409


def test_command_line_declares_adds_and_ends_with_the_verdict(
    api: Api, rollout: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        folder = ("--folder", str(api.folder.path))
        return main(["fleet", arguments[0], *arguments[1:], *folder])

    give = ("evidence", "a", "--gate", "complaints")
    assert run("verdict", "a") == 23
    assert run("verdict", "a", "--wait", "--timeout", "0.01", "--json") == 23
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["verdict"] == "undecided"
    assert run(*give, "--value", "nan") == 2
    assert run(*give, "--stop", "--reason", "\x1b[2Jgone") == 0
    assert "\x1b" not in capsys.readouterr().out
    rollout.run(succeed)
    assert run("verdict", "a", "--wait") == 22
    assert "a: stop" in capsys.readouterr().out
    begin = ("rollout", "start", "r", "--to", "name=d0*", "--name", "b", "--evidence")
    assert run(*begin, "shop limit=much") == 2
    assert run(*begin, "shop colour=red") == 2
    assert run(*begin, "shop worse=lower limit=-0.5 compare=difference unit='% of visits' deadline_s=60") == 0
    with api.store.snapshot() as session:
        (_, _, begun), *_ = read_entries(session, "b")
    assert begun.settings.evidence["shop"].unit == "% of visits"  # type: ignore[union-attr]
