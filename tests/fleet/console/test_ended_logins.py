"""Forms that are sent under a login that has ended: none is lost, and none is done without a word."""

import html
import re

import pytest
from tests.fleet.console.conftest import PASSWORD, Client, log_in
from tests.toolkit.cases import cases

from edgekit_fleet.console.app import make_app
from edgekit_fleet.store.tables import LoginRow

ACTIONS = (
    *("/audit/verify", "/devices/d-0001/revoke", "/devices/d-0001/tags", "/queries", "/queries/remove"),
    *("/releases/r/withdraw", "/rollouts", "/rollouts/r/order", "/settings/codes", "/settings/tokens"),
    *("/settings/users", "/settings/windows", "/devices/d-0001/settings", "/devices/d-0001/logs"),
    *("/samples/delete", "/samples/setting", "/samples/orders/s/stop", "/samples/s/delete"),
)


def read_hidden(text):
    """Return the hidden fields of the first form of the page's content."""
    form = text.partition("<main")[2].partition("<form")[2].partition("</form>")[0]
    found = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in found}


@pytest.mark.parametrize("path", ACTIONS)
def test_form_of_a_login_that_has_ended_is_confirmed_after_the_next_login(served, path):
    client = log_in(served, "maria")
    csrf = re.search(r'name="csrf" value="([^"]+)"', client.get("/").text)[1]
    with served.store.transaction() as session:
        session.query(LoginRow).update({"expires_at": 1.0})
    fields = {"name": "a<b & c", "password": "secret of the form", "note": "é\n=&"}
    door = client.post(path, csrf=csrf, **fields)
    assert (door.status, "nothing was done yet" in door.text) == (401, True)
    assert "secret of the form" not in door.text
    hidden = read_hidden(door.text)
    wrong = client.post("/login", name="maria", **{**hidden, "password": "wrong"})
    assert (wrong.status, read_hidden(wrong.text)["order_before"]) == (401, hidden["order_before"])
    page = client.post("/login", name="maria", **{**hidden, "password": PASSWORD})
    assert (page.status, f'action="{path}"' in page.text) == (200, True)
    assert "a&lt;b &amp; c" in page.text
    again = read_hidden(page.text)
    assert {name: again.get(name) for name in ("name", "note")} == {"name": "a<b & c", "note": "é\n=&"}
    assert 'type="password"' in page.text
    done = client.post(path, **again, password="secret of the form")  # noqa: S106
    assert done.status in (200, 303, 404, 422)
    assert "Nothing was done yet" not in done.text


def test_form_of_the_login_before_is_confirmed(served):
    client = log_in(served, "maria")
    answer = client.post("/queries", csrf="of another login", name="mine", selector="site=lyon")
    assert (answer.status, "Nothing was done yet" in answer.text) == (403, True)
    done = client.post("/queries", **read_hidden(answer.text))
    assert "Saved as" in client.follow(done).text


@cases(
    "path, headers, is_kept",
    [
        (path, headers, is_kept)
        for path in ("/settings/users", "/login")
        for headers, is_kept in (
            ({"sec-fetch-site": "same-origin"}, True),
            ({"sec-fetch-site": "same-site", "origin": "OWN"}, False),  # another port of this host
            ({"sec-fetch-site": "cross-site"}, False),
            ({"sec-fetch-site": "none"}, False),
            ({"origin": "OWN"}, True),
            ({"origin": "http://127.0.0.1:1"}, False),
            ({"origin": "null"}, False),
            ({}, False),
        )
    ],
)
def test_form_of_another_login_is_confirmed_only_from_a_page_of_the_console(served, path, headers, is_kept):
    client = log_in(served, "maria")
    headers = {name: served.address if value == "OWN" else value for name, value in headers.items()}
    order = "/settings/users?action=add&name=eve&role=admin"
    fields = {"csrf": "guess", "action": "add", "name": "eve", "order_before": order}
    answer = client.post_from(headers, path, **fields)
    assert (answer.status, "Nothing was done yet" in answer.text) == (403, is_kept)
    assert ("eve" in answer.text) == is_kept
    if is_kept:
        assert read_hidden(answer.text)["name"] == "eve"
        assert 'action="/settings/users"' in answer.text


def test_confirmation_shows_every_field_of_the_form_but_its_password(served):
    fields = {"name": "eve", "next": "/rollouts", "role": "admin", "password": "secret of the form"}
    answer = log_in(served, "maria").post("/settings/users", csrf="of another login", **fields)
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd[^>]*>([^<]+)</dd>", answer.text))
    assert facts == {"to": "/settings/users", "name": "eve", "next": "/rollouts", "role": "admin"}
    assert "secret of the form" not in answer.text


def test_form_is_kept_if_another_tab_logs_in_first(served):
    client = log_in(served, "maria")
    csrf = re.search(r'name="csrf" value="([^"]+)"', client.get("/").text)[1]
    with served.store.transaction() as session:
        session.query(LoginRow).update({"expires_at": 1.0})
    door = read_hidden(client.post("/queries", csrf=csrf, name="mine", selector="site=lyon").text)
    tab = read_hidden(client.get("/login").text)
    assert client.post("/login", name="maria", **tab, password=PASSWORD).status == 303
    page = client.post("/login", name="maria", **door, password=PASSWORD)
    assert "Nothing was done yet" in page.text
    done = client.post("/queries", **read_hidden(page.text))
    assert "Saved as" in client.follow(done).text


def test_login_after_the_login_of_another_tab_goes_on_to_its_page(served):
    client = Client(served.port)
    tabs = [read_hidden(client.get("/login?next=/audit").text) for _ in range(2)]
    answers = [client.post("/login", name="maria", **tab, password=PASSWORD) for tab in tabs]
    assert [(each.status, each.headers.get("location")) for each in answers] == [(303, "/audit")] * 2


def test_form_of_a_stranger_is_not_kept(served):
    answer = Client(served.port).post("/queries", csrf="guess", name="mine", selector="site=lyon")
    assert (answer.status, answer.headers["location"]) == (303, "/login?next=/")


@cases("path", [*ACTIONS, "/theme", "/logout"])
def test_address_of_an_action_leads_to_a_page(served, path):
    client = log_in(served, "maria")
    answer = client.get(path)
    for _ in range(3):
        answer = client.follow(answer) if answer.status == 303 else answer
    assert answer.status in (200, 404)
    assert "Method Not Allowed" not in answer.text


def test_actions_here_are_those_of_the_console(served):
    routes = [each for each in make_app(served.console).routes if hasattr(each, "methods")]
    patterns = {each.path_regex.pattern for each in routes if "POST" in (each.methods or ())}
    known = {*ACTIONS, "/theme", "/logout", "/login", "/first", "/releases", "/second-factor"}
    assert [one for one in patterns if not any(re.fullmatch(one, path) for path in known)] == []
