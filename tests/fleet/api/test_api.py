"""The HTTP interface: who gets in, pages, repeats, uploads, waiting, and that its document is true."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select, text
from tests.fleet.api.conftest import Api
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as maker  # a fixture
from tests.runtime.slot_cases import write_keys

from edgekit_fleet.api import repeats
from edgekit_fleet.api.endpoints.table import ENDPOINTS
from edgekit_fleet.store.tables import IdempotencyRow, RolloutRow


def test_request_without_a_good_token_is_refused_as_a_problem(api: Api):
    for token in ("", "ekt_invented", api.make_token("old", "read", life_s=0.0)):
        answer = api.get("/devices", token or "none")
        assert (answer.status, answer.headers["content-type"]) == (401, "application/problem+json")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json["status"] == 401 and answer.json["detail"]


def test_headers_of_single_sign_on_are_nothing_to_programs(api: Api):
    headers = {"x_auth_request_preferred_username": "ann", "x_auth_request_groups": "edge-admins"}
    assert api.send("GET", "/users", **headers).status == 401
    token = api.make_token("ci", "read")
    assert api.send("GET", "/devices", authorization=f"Bearer {token}", **headers).status == 200
    assert api.send("GET", "/users", authorization=f"Bearer {token}", **headers).status == 403


def test_second_factor_is_given_by_who_may_give_the_role(api: Api):
    api.post("/users", {"name": "ann", "password": "correct horse battery", "role": "admin"})
    assert api.post("/users/ann/second-factor", {}, api.make_token("ci", "read", "admin")).status == 403
    factor = api.post("/users/ann/second-factor", {})
    assert (factor.status, factor.json["uri"][:10]) == (201, "otpauth://")
    assert api.get("/users").json["items"][0]["has_second_factor"] is True
    assert api.delete("/users/ann/second-factor").json["items"][0]["has_second_factor"] is False


def test_token_does_what_its_scopes_allow(api: Api):
    token = api.make_token("ci", "read", "rollout")
    assert api.get("/devices?limit=1", token).status == 200
    assert api.get("/tokens", token).status == 403
    order = {"order": "pause"}
    assert api.post("/rollouts/none/orders", order, token).status == 404
    assert api.post("/devices/none/revoke", {"reason": "lost"}, token).status == 403


def test_reading_does_not_wait_for_the_lock_of_the_writers(api: Api):
    api.get("/releases")  # which notes the use of the token
    with api.store.transaction() as session:
        session.execute(text("SELECT 1"))
        statuses = [api.get(path).status for path in ("/users", "/tokens", "/webhooks", "/releases/x")]
    assert statuses == [200, 200, 200, 404]


def test_token_cannot_make_a_token_with_more_scopes(api: Api):
    token = api.make_token("clerk", "admin")
    assert api.post("/tokens", {"name": "t", "scopes": ["device"]}, token).status == 403
    assert api.post("/tokens", {"name": "t", "scopes": ["admin"]}, token).status == 201


def test_token_cannot_make_or_become_a_user_who_may_more(api: Api):
    token, password = api.make_token("clerk-2", "admin"), "correct horse battery"
    user = {"name": "eve", "password": password, "role": "viewer"}
    assert api.post("/users", {**user, "role": "admin"}, token).status == 403
    assert api.post("/users", user, token).status == 403  # it cannot read itself
    assert api.post("/users", {**user, "role": "admin"}).status == 201
    assert api.post("/users/eve/password", {"password": password}, token).status == 403
    assert api.post("/users/eve/role", {"role": "operator"}, token).status == 403


def test_pages_hold_every_device_once_in_order(api: Api):
    names, after = [], ""
    while after is not None:
        page = api.get(f"/devices?limit=7&after={after}").json
        assert len(page["items"]) <= 7
        names += [each["name"] for each in page["items"]]
        after = page["next"]
    assert len(names) == 60
    assert names == sorted(set(names))
    some = api.get("/devices?selector=online%3Dyes&limit=1000").json["items"]
    assert 0 < len(some) < 60 and all(each["is_online"] for each in some)


@pytest.mark.parametrize("path", ["/releases", "/rollouts"])
def test_pages_of_releases_and_rollouts_go_from_new_to_old(api: Api, path: str):
    if path == "/rollouts":
        with api.store.transaction() as session:
            for number in range(5):
                session.add(_make_rollout(f"r{number}", 1000.0 + number // 2))
    all_of_them = api.get(f"{path}?limit=1000").json["items"]
    found, after = [], ""
    while after is not None:
        page = api.get(f"{path}?limit=1&after={after}").json
        found += page["items"]
        after = page["next"]
    assert found == all_of_them and len(found) > 1
    assert [each["created_at"] for each in found] == sorted(
        (each["created_at"] for each in found), reverse=True
    )


def test_audit_pages_go_back_to_the_first_entry(api: Api):
    numbers, before = [], 0
    while before is not None:
        page = api.get(f"/audit?limit=30&before={before}").json
        numbers = [each["number"] for each in page["items"]] + numbers
        before = page["next"]
    assert numbers == list(range(1, len(numbers) + 1))


def test_request_that_only_reads_leaves_no_row_for_its_key(api: Api):
    reader = api.make_token("reader", "read")
    for endpoint in ENDPOINTS:
        if endpoint.method == "POST":
            path = endpoint.path.replace("{", "").replace("}", "")
            assert api.post(path, {}, token=reader, idempotency_key="k1").status != 500
    with api.store.snapshot() as session:
        assert not session.scalars(select(IdempotencyRow)).all()


def test_repeated_request_is_carried_out_once(api: Api):
    body = {"names": ["new-1"]}
    device = "d1"
    tags = {"tags": {"site": "lyon"}, "is_sure": True}
    first = api.post(f"/devices/{device}/tags", tags, idempotency_key="k1")
    second = api.post(f"/devices/{device}/tags", tags, idempotency_key="k1")
    assert (first.status, first.data) == (second.status, second.data) == (200, first.data)
    entries = api.get(f"/audit?subject={device}&action=device.tag&limit=10").json["items"]
    assert len(entries) == 1
    other = api.post(f"/devices/{device}/tags", {"tags": {"site": "nice"}}, idempotency_key="k1")
    assert other.status == 422
    elsewhere = api.post("/invitations", body, idempotency_key="k1")
    assert elsewhere.status == 422
    assert (
        api.post("/invitations", body, token=api.make_token("b", "device"), idempotency_key="k1").status
        == 201
    )


def test_answer_with_a_secret_is_not_kept(api: Api):
    body = {"name": "ci", "scopes": ["read"]}
    secret = api.post("/tokens", body, idempotency_key="k").json["token"]
    assert api.post("/tokens", body, idempotency_key="k").status == 409
    with api.store.snapshot() as session:
        assert secret.encode() not in session.get(IdempotencyRow, ("token:tests", "k")).answer


def test_store_cannot_confirm_a_guess_of_a_password(api: Api):
    plain = {"name": "eve", "password": "a long password", "role": "viewer"}
    assert api.post("/users", plain, idempotency_key="k1").status < 300
    with api.store.snapshot() as session:
        row = session.scalars(select(IdempotencyRow)).one()
    said = b"\n".join((b"POST", b"/api/v1/users", json.dumps(plain).encode()))
    assert row.request_sha256 != hashlib.sha256(said).hexdigest()


def test_request_under_way_is_not_begun_again(api: Api):
    keyed = repeats.KeyedRequest("ann", "k", "0" * 64)
    assert repeats.begin_request(api.store, keyed, 1000.0) is None
    with pytest.raises(Exception, match="is being carried out"):
        repeats.begin_request(api.store, keyed, 1001.0)
    assert repeats.begin_request(api.store, keyed, 1601.0) is None  # its process has ended meanwhile
    repeats.end_request(api.store, keyed, 503, b"later")
    assert repeats.begin_request(api.store, keyed, 1602.0) is None  # failed on our side: again
    repeats.end_request(api.store, keyed, 409, b"no")
    assert repeats.begin_request(api.store, keyed, 1603.0) == (409, b"no")
    assert repeats.begin_request(api.store, keyed, 1602.0 + 86_401) is None


@pytest.mark.parametrize(
    ("content", "sha256", "status"),
    [
        (b"no package", None, 422),
        (b"cut", hashlib.sha256(b"whole").hexdigest(), 409),
        (b"x", "nothing", 404),
    ],
)
def test_upload_that_is_no_package_leaves_nothing(api: Api, content: bytes, sha256: str | None, status: int):
    path = f"/packages/{sha256 or hashlib.sha256(content).hexdigest()}"
    answer = api.send("PUT", path, content, authorization=f"Bearer {api.token}")
    assert answer.status == status, answer.data
    uploads = api.folder.path / "uploads"
    assert not uploads.exists() or not list(uploads.iterdir())


def test_upload_with_a_query_is_refused(api: Api):
    path = f"/packages/{hashlib.sha256(b'x').hexdigest()}?x=1"
    assert api.send("PUT", path, b"x", authorization=f"Bearer {api.token}").status == 422


def test_body_over_the_limit_is_refused(api: Api):
    answer = api.send(
        "POST",
        "/invitations",
        b'{"names": ["' + b"x" * (1 << 20) + b'"]}',
        authorization=f"Bearer {api.token}",
        content_type="application/json",
    )
    assert answer.status == 413


def _make_rollout(name: str, created_at: float = 1000.0, state: str = "running") -> RolloutRow:
    return RolloutRow(
        name=name,
        release="2026-11-16.1",
        selector="all",
        state=state,
        because="",
        settings={"waves": [1, 2]},
        wave=0,
        created_at=created_at,
        created_by="ann",
    )


@pytest.mark.parametrize(
    ("until", "state", "is_awaited"),
    [("ended", "succeeded", True), ("stopped", "paused", True), ("ended", "paused", False)],
)
def test_wait_ends_with_the_rollout(api: Api, until: str, state: str, is_awaited: bool):
    with api.store.transaction() as session:
        session.add(_make_rollout("r1"))

    def end() -> None:
        with api.store.transaction() as session:
            session.get(RolloutRow, "r1").state = state

    timer = threading.Timer(0.3, end)
    timer.start()
    limit_s, begin_s = 20 if is_awaited else 1, time.monotonic()
    answer = api.get(f"/rollouts/r1?wait={limit_s}&until={until}")
    took_s = time.monotonic() - begin_s
    timer.join()
    assert answer.json["state"] == state
    assert (took_s < limit_s - 0.1) == is_awaited


def test_release_and_rollout_go_by_the_interface(
    api: Api, maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    write_keys(tmp_path / "keys")
    content = maker.write(tmp_path / "package", target="rpi5")
    digest = hashlib.sha256(content).hexdigest()
    bearer = f"Bearer {api.token}"
    uploaded = api.send("PUT", f"/packages/{digest}", content, authorization=bearer)
    assert uploaded.status == 201 and uploaded.json["target"] == "rpi5", uploaded.data
    made = api.post("/releases", {"packages": [digest], "name": "v2"})
    assert made.status == 201, made.data
    assert api.post("/releases", {"packages": [digest], "name": "v2"}).status == 409
    assert api.get("/releases/v2").json == made.json
    plan = api.post("/rollouts/plan", {"release": "v2", "selector": "all"}).json
    assert [each["device"] for each in plan["planned"]] == ["d1"], plan["refused"][:3]
    settings = {"release": "v2", "selector": "all", "soak_s": 1, "limits": {"min_agreement": 0.9}}
    started = api.post("/rollouts", settings)
    assert started.status == 201, started.data
    name = started.json["name"]
    assert api.post(f"/rollouts/{name}/orders", {"order": "pause"}).status == 200
    assert api.post(f"/rollouts/{name}/orders", {"order": "abort", "note": "bad"}).status == 200
    assert api.get(f"/rollouts/{name}/replay").json == {"differences": []}
    assert api.get(f"/audit?subject={name}&limit=1").json["items"][0]["actor"] == "token:tests"


def test_users_and_tokens_are_managed(api: Api):
    password = "correct horse"  # noqa: S105
    assert api.post("/users", {"name": "ann", "password": password, "role": "admin"}).status == 201
    assert api.post("/users/ann/role", {"role": "viewer"}).status == 409
    assert api.post("/users", {"name": "vic", "password": password}).json["items"][1]["role"] == "viewer"
    assert api.delete("/users/ann").status == 409
    assert api.delete("/users/vic").status == 200
    assert api.delete("/users/vic").status == 404
    api.post("/tokens", {"name": "t", "scopes": ["read"]})
    assert json.dumps(api.get("/tokens").json).count('"t"') == 1
    assert api.delete("/tokens/t").status == 200


FURTHER_ENDPOINT = """
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import Fleet, Named, endpoint


@endpoint("GET", "/names/{name}", scope="read", summary="Return a name.")
def read_name(fleet: Fleet, principal: Principal, request: Named) -> Named:
    return request
"""


def test_further_endpoint_is_a_file(tmp_path: Path):
    (tmp_path / "further.py").write_text(FURTHER_ENDPOINT)
    code = (
        "import sys; from edgekit_fleet.api import endpoints; endpoints.__path__.append(sys.argv[1])\n"
        "from edgekit_fleet.api.openapi import make_document\n"
        "print(make_document()['paths']['/names/{name}']['get']['summary'])"
    )
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "Return a name.\n", done.stderr
