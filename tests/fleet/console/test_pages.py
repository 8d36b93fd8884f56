"""Fleet, devices, audit, settings, login: what they show, and what their forms change."""

import re
import time

import pytest
from sqlalchemy import event
from sqlalchemy import text as sql
from tests.fleet.console.conftest import DEVICES, PASSWORD, Client, log_in
from tests.toolkit.cases import cases

from edgekit_fleet.access import failure_limit
from edgekit_fleet.console import fleet_page
from edgekit_fleet.manager.expiry import Expiry, alarm_expiries
from edgekit_fleet.operations import devices, streams
from edgekit_fleet.store.tables import DeviceLogRow, DeviceRow, RolloutRow, TokenRow, UserRow
from edgekit_runtime.protocol.streams import StreamOptions

READABLE = (
    *("/", "/devices", "/releases", "/rollouts", "/health", "/audit"),
    *("/settings/codes", "/settings/fleet"),
)


def words(text):
    """Return what a page says, without markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("<main")[2]))


def pick(served, **columns):
    with served.store.snapshot() as session:
        return session.query(DeviceRow).filter_by(**columns).order_by(DeviceRow.name).first()


def test_first_page_says_what_needs_attention_with_counts(client, served):
    with served.store.snapshot() as session:
        faulty = session.query(DeviceRow).filter_by(status="faulty").count()
    page = client.get("/")
    said = words(page.text)
    assert re.search(rf"{faulty} devices? runs? a model whose answers are NaN", said)
    assert f"detector 1.5.0 answers NaN to finite inputs ({faulty})" in said
    assert 'href="/devices?status=faulty"' in page.text
    assert said.index("NaN") < said.index("something else than wanted")
    assert "1.5.0" in said
    assert "1.4.0" in said


def test_first_page_after_the_start_compiles_no_statement_of_its_own(served):
    fleet_page.warm_up(served.store)
    compiled, connections = [], []
    event.listen(served.store.engine, "connect", lambda *_: connections.append(1))

    @event.listens_for(served.store.engine, "before_cursor_execute")
    def note(_connection, _cursor, statement, _parameters, context, _many):
        if context.compiled is not None and context.cache_hit.name != "CACHE_HIT":
            compiled.append(statement)

    with served.store.snapshot() as one, served.store.snapshot() as other:
        for session in (one, other):
            fleet_page._read_values(session)
    assert compiled == []
    assert connections == []


def test_first_page_says_what_ends_soon_and_what_to_do(client, served):
    root = Expiry(
        what="root of the repository",
        ends_at=time.time() + 20 * 86_400.0,
        notice_s=60 * 86_400.0,
        advice="sign it again",
    )
    with served.store.transaction() as session:
        alarm_expiries(session, [root], time.time())
    page = client.get("/")
    assert re.search(
        r"The root of the repository ends at [-0-9]+ [:0-9]+ UTC\. Sign it again", words(page.text)
    )
    assert 'href="/audit?action=alarm.expiry"' in page.text


def test_list_goes_through_all_devices_once(client):
    address, seen = "/devices", []
    while address:
        page = client.get(address).text
        seen += re.findall(r'<th scope="row"><a href="/devices/([^"]+)"', page)
        found = re.search(r'href="([^"]+)" rel="next"', page)
        address = found[1].replace("&amp;", "&") if found else ""
    assert len(seen) == len(set(seen)) == DEVICES


def test_list_is_filtered_on_the_server(client):
    said = words(client.get("/devices?selector=site%3Dlyon+and+class%3Drpi5").text)
    assert "lyon-" in said
    assert "paris-" not in said
    assert "jetson" not in said.partition("Models")[2]


def test_one_word_is_part_of_a_name(client):
    said = words(client.get("/devices?selector=00007").text)
    assert "1 found" in said


def test_malformed_selector_shows_where(client):
    answer = client.get("/devices?selector=site%3D")
    assert answer.status == 200
    assert "expected a value" in words(answer.text)
    assert 'aria-invalid="true"' in answer.text


def test_saved_filter_is_offered_to_all(client, served):
    answer = client.post("/queries", name="Lyon's cameras", selector="site=lyon", next="/devices")
    assert "Saved as" in client.follow(answer).text
    assert "Lyon&#39;s cameras" in log_in(served, "vera").get("/devices").text
    client.post("/queries/remove", name="Lyon's cameras")
    assert "cameras" not in client.get("/devices").text


def test_saved_window_is_offered_by_plans_and_may_be_forgotten(client, served):
    answer = client.post("/settings/windows", name="night", window="01:00-04:00")
    assert "Plans offer the window" in client.follow(answer).text
    offered = '<option value="01:00-04:00">night</option>'
    assert offered in client.get("/rollouts/new").text
    for wrong in ("0-24", "01:00-01:00"):
        assert client.post("/settings/windows", name="all day", window=wrong).status == 422
    assert log_in(served, "vera").post("/settings/windows", name="x", window="01:00-02:00").status == 403
    client.post("/settings/windows", name="night", action="remove")
    assert offered not in client.get("/rollouts/new").text


def test_device_shows_why_and_marks_what_differs(client, served):
    device = pick(served, status="diverged")
    page = client.get(f"/devices/{device.name}")
    why = devices.describe(served.store, device.name).why
    assert why in words(page.text).replace("&#39;", "'")
    assert 'class="differs"' in page.text
    assert "differs" in words(page.text)
    fine = pick(served, status="converged", is_online=True)
    assert 'class="differs"' not in client.get(f"/devices/{fine.name}").text


def test_device_that_states_nonsense_has_a_page(client, served):
    name = pick(served, status="converged").name
    with served.store.transaction() as session:
        row = session.get(DeviceRow, name)
        row.facts = {**row.facts, "free_bytes": "9" * 400, "memory_bytes": "nan", "": "x" * 2000}
    assert client.get(f"/devices/{name}").status == 200


def test_device_shows_its_streams_without_passwords_and_links_to_its_live_page(client, served):
    name = pick(served, status="converged").name
    assert "Streams" not in words(client.get(f"/devices/{name}").text)
    settings = StreamOptions(model="detector", source="rtsp://me:secret@camera/1")
    streams.set_stream(served.store, name, "yard", settings, actor="test")
    page = client.get(f"/devices/{name}").text
    assert "yard detector rtsp://camera/1 the live page nothing yet" in words(page)
    assert "should run the stream yard by test" in words(page)
    assert f"ssh -L 8000:127.0.0.1:8000 {name}" in words(page)
    assert "secret" not in page
    for live, has_link in (("https://d/live", True), ("javascript:alert(1)", False)):
        with served.store.transaction() as session:
            row = session.get(DeviceRow, name)
            row.facts = {**row.facts, "live": live}
            stated = {"model": "detector", "state": "waiting", "fps": 2.0, "error": "<b>no route</b>"}
            row.reported = {**row.reported, "streams": {"yard": stated}}
        page = client.get(f"/devices/{name}").text
        assert (f'href="{live}"' in page) is has_link
        assert "waiting, 2.0 a second" in words(page)
        assert "&lt;b&gt;no route" in page


def test_unknown_device_is_not_found(client):
    answer = client.get("/devices/nobody")
    assert answer.status == 404
    assert "no device &#39;nobody&#39; is enrolled" in answer.text


def test_tags_are_changed(client, served):
    device = pick(served, status="converged")
    answer = client.post(f"/devices/{device.name}/tags", tags="site=oslo beta=yes")
    assert answer.status == 303
    assert pick(served, name=device.name).tags == {"site": "oslo", "beta": "yes"}
    assert device.name in client.get("/devices?selector=site%3Doslo").text


def test_tags_that_change_a_rollout_ask_first(client, served):
    device = pick(served, status="converged")
    with served.store.transaction() as session:
        session.add(
            RolloutRow(
                name="wide",
                release="2026-11-16.1",
                selector="site=oslo",
                state="running",
                settings={"is_dynamic": True, "waves": [1]},
                created_at=time.time(),
            )
        )
    address = f"/devices/{device.name}/tags"
    asked = client.post(address, tags="site=oslo")
    assert asked.status == 200
    assert "joins rollout" in words(asked.text)
    assert pick(served, name=device.name).tags == device.tags
    assert client.post(address, tags="site=oslo", confirmed="yes").status == 303
    assert pick(served, name=device.name).tags == {"site": "oslo"}


def test_revocation_asks_and_wants_a_reason(client, served):
    device = pick(served, status="converged")
    assert "void for ever" in words(client.get(f"/devices/{device.name}/revoke").text)
    assert client.post(f"/devices/{device.name}/revoke", why=" ").status == 422
    assert client.post(f"/devices/{device.name}/revoke", why="stolen").status == 303
    row = pick(served, name=device.name)
    assert (row.status, row.because, row.is_online) == ("revoked", "stolen", False)
    assert "Revoke" not in words(client.get(f"/devices/{device.name}").text)


def test_audit_is_filtered(client, served):
    device = pick(served, status="converged")
    client.post(f"/devices/{device.name}/revoke", why="stolen")
    said = words(client.get(f"/audit?subject={device.name}&action=device.rev").text)
    assert "stolen" in said
    assert "1 shown" in said


def test_changed_entry_breaks_the_chain(client, served):
    client.post("/audit/verify")
    assert "The chain holds" in words(client.get("/audit").text)
    with served.store.transaction() as session:
        session.execute(sql("DROP TRIGGER audit_no_update"))
        session.execute(sql("UPDATE audit SET actor = 'nobody' WHERE number = 5"))
    client.post("/audit/verify")
    assert "The chain is broken at entry 5" in words(client.get("/audit").text)


def test_token_is_shown_once_and_kept_as_digest(client, served):
    answer = client.post("/settings/tokens", name="ci", days="30", **{"scope-read": "yes"})
    secret = re.search(r"ekt_[\w-]+", answer.text)[0]
    assert secret not in client.get("/settings/tokens").text
    with served.store.snapshot() as session:
        row = session.get(TokenRow, "ci")
        assert row.secret_sha256 != secret
        assert row.scopes == ["read"]
    client.follow(client.post("/settings/tokens", name="ci", action="revoke"))
    assert "No token." in words(client.get("/settings/tokens").text)


def test_code_of_enrolment_is_shown_once(client):
    answer = client.post("/settings/codes", names="new-1 new-2", target="rpi5", tags="site=oslo")
    assert answer.text.count("edgekit-device enroll --code 127.0.0.1:8443/") == 2
    after = client.get("/settings/codes").text
    assert "new-2" in after
    assert "--code" not in after


def test_users_are_added_and_the_last_administrator_stays(client, served):
    client.post("/settings/users", action="add", name="nils", password=PASSWORD, role="viewer")
    client.post("/settings/users", action="role", name="nils", role="operator")
    with served.store.snapshot() as session:
        assert session.get(UserRow, "nils").role == "operator"
    refused = client.post("/settings/users", action="remove", name="maria")
    assert refused.status == 422
    assert "last administrator" in words(refused.text)


@cases("path", READABLE)
def test_viewer_sees_every_page_and_stranger_none(path, served):
    assert log_in(served, "vera").get(path).status == 200
    answer = Client(served.port).get(path)
    assert answer.status == 303
    assert answer.headers["location"].startswith("/login?next=")


def test_viewer_sees_neither_users_nor_tokens(served):
    vera = log_in(served, "vera")
    assert vera.get("/settings").headers["location"] == "/settings/fleet"
    assert vera.get("/settings/tokens").status == 403
    assert "/settings/tokens" not in vera.get("/settings/fleet").text


@cases(
    ("path", "form"),
    [
        ("/devices/x/tags", {"tags": "a=b"}),
        ("/devices/x/revoke", {"why": "x"}),
        ("/devices/x/settings", {"power-w": "12"}),
        ("/devices/x/logs", {}),
        ("/settings/users", {"action": "add"}),
        ("/settings/tokens", {"name": "x"}),
        ("/settings/codes", {"names": "x"}),
        ("/queries", {"name": "x", "selector": "all"}),
    ],
)
def test_viewer_changes_nothing(path, form, served):
    answer = log_in(served, "vera").post(path, **form)
    assert answer.status == 403
    assert "lacks the scope" in answer.text


def test_login_opens_the_page_that_was_asked_for(served):
    client = Client(served.port)
    login = client.get(client.get("/audit?action=device").headers["location"])
    form = login.text.partition("<main")[2]
    target = re.search(r'name="next" value="([^"]+)"', form)[1]
    csrf = re.search(r'name="csrf" value="([^"]+)"', form)[1]
    wrong = client.post("/login", name="vera", password="wrong", next=target, csrf=csrf)  # noqa: S106
    assert (wrong.status, "name or password is wrong" in wrong.text) == (401, True)
    right = client.post("/login", name="vera", password=PASSWORD, next=target, csrf=csrf)
    assert right.headers["location"] == "/audit?action=device"
    assert client.follow(right).status == 200
    client.follow(client.post("/logout"))
    assert client.get("/audit").status == 303


def test_browser_of_a_user_is_let_in_while_others_guess(served, monkeypatch):
    monkeypatch.setattr(failure_limit, "MAX_FAILURES", 2)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def try_to_log_in(client, password):
        csrf = re.search(r'name="csrf" value="([^"]+)"', client.get("/login").text)[1]
        return client.post("/login", name="vera", password=password, csrf=csrf).status

    own, foreign = Client(served.port), Client(served.port)
    assert try_to_log_in(own, PASSWORD) == 303
    own.post("/logout")
    assert [try_to_log_in(foreign, "guess") for _ in range(3)] == [401, 401, 429]
    assert try_to_log_in(own, PASSWORD) == 303


def test_part_of_an_open_page_leads_to_no_login_as_a_form_may_be_filled_in(served):
    answer = Client(served.port).get("/", **{"hx-request": "true"})
    assert (answer.status, answer.headers.get("hx-redirect")) == (401, None)


def test_link_makes_the_first_administrator_once(served):
    with served.store.transaction() as session:
        session.query(UserRow).delete()
    client = Client(served.port)
    code = served.console.first_admin.secret
    page = client.get(f"/first?code={code}")
    csrf = re.search(r'name="csrf" value="([^"]+)"', page.text)[1]
    form = {"code": code, "password": PASSWORD, "csrf": csrf}
    assert client.follow(client.post("/first", name="ada", **form)).status == 200
    again = Client(served.port)
    page = again.get("/first?code=x")
    form["csrf"] = re.search(r'name="csrf" value="([^"]+)"', page.text)[1]
    assert again.post("/first", name="eve", **form).status == 422


@pytest.mark.parametrize(("path", "status"), [("/first", 422), ("/logout", 303)])
def test_stranger_does_not_wait_for_the_lock_of_the_writers(path, status, served):
    stranger = Client(served.port)
    page = stranger.get("/first?code=guess").text
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)[1]
    with served.store.transaction() as session:
        session.execute(sql("SELECT 1"))
        answer = stranger.post(path, code="guess", name="eve", password=PASSWORD, csrf=csrf)
    assert answer.status == status


@pytest.mark.parametrize("path", ["/devices", "/audit", "/devices/x", "/login"])
def test_hostile_input_is_text(path, client):
    evil = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
    answer = client.get(
        f"{path}?selector={evil}&subject={evil}&actor={evil}&next={evil}&after={evil}&sort={evil}"
    )
    assert "<script>alert" not in answer.text
    assert answer.status in (200, 404)


def test_logs_and_settings_of_a_device_are_shown_as_text_and_asked_for_by_who_may(client, served):
    name = pick(served, status="converged").name
    page = client.get(f"/devices/{name}").text
    assert "Ask for its logs" in page and 'name="battery-floor"' in page
    assert client.follow(client.post(f"/devices/{name}/logs")).status == 200
    assert "It has not answered yet" in client.get(f"/devices/{name}").text
    with served.store.transaction() as session:
        log = session.get_one(DeviceLogRow, name)
        log.answered_at, log.source, log.text = 1.0, "memory", "<script>alert(1)</script>\nsecond"
        session.get_one(DeviceRow, name).settings = {"log-level": "<b>"}
    page = client.get(f"/devices/{name}").text
    assert "<script>alert" not in page and "<b>" not in page
    assert "&lt;script&gt;alert(1)" in page and "memory of service and agent" in page
    assert client.follow(client.post(f"/devices/{name}/settings", **{"power-w": "12"})).status == 200
    assert client.post(f"/devices/{name}/settings", **{"power-w": "lots"}).status in (409, 422)
    with served.store.snapshot() as session:
        assert session.get_one(DeviceRow, name).settings["power-w"] == "12"
    assert "Last lines" not in log_in(served, "vera").get(f"/devices/{name}").text
