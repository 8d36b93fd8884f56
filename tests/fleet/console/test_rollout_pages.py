"""The pages of rollouts, releases and model health over a filled store, without a browser."""

import html
import re
import threading
import time
from contextlib import ExitStack

import pytest
from tests.fleet.console.rollout_sample import add_rollout, device_name
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN, NOW

from edgekit_fleet.console.rollouts.background import Background
from edgekit_fleet.console.rollouts.rollout_log import RolloutLog
from edgekit_fleet.operations.names import check_name
from edgekit_fleet.operations.rollouts import find_rollout
from edgekit_fleet.rollouts.gate_table import LIMITS
from edgekit_fleet.rollouts.outside_gates import Evidence, OutsideGate
from edgekit_fleet.rollouts.runner import RolloutRunner, log_entries, read_entries
from edgekit_fleet.store.tables import ReleaseRow
from edgekit_runtime.errors import FleetError

NAME = "2026-11-22-r1"
RELEASE = "2026-11-16.1"


def words(text):
    """Return what a page says, without markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("<main")[2]))


def orders(served, name):
    with served.store.snapshot() as session:
        return [entry.order for _, _, entry in read_entries(session, name) if hasattr(entry, "order")]


def test_form_of_a_rollout_offers_every_limit(client, served):
    page = html.unescape(client.get("/rollouts/new").text)
    for limit in LIMITS:
        assert f'name="{limit.name}"' in page
        assert limit.label in page


def test_rollout_that_stopped_shows_its_verdict_and_the_gate_against_its_limit(client, served):
    run = add_rollout(served.store, NAME, BAD_MODELS["-5 points, no labels"])
    page = client.get(f"/rollouts/{NAME}")
    said = words(page.text)
    assert page.status == 200
    assert run.progress.last.sentence in said
    assert "This stopped it." in said
    assert "stops at 5 %" in said
    assert page.text.count('class="chart"') >= 5
    assert f"{sum(one.state == 'returning' for one in run.progress.members.values())} went back" in said
    assert 'value="pause"' not in page.text


def test_failures_are_grouped_by_reason_with_devices_to_open(client, served):
    run = add_rollout(served.store, NAME, BAD_MODELS["30 % fail to install"])
    failed = [name for name, one in run.progress.members.items() if one.sample and one.sample.is_failed]
    page = client.get(f"/rollouts/{NAME}").text
    assert "<code>self-test</code>: the self-test gives other answers" in page
    assert any(f'href="/devices/{device_name(NAME, name)}"' in page for name in failed)


def test_crashed_devices_are_a_reason_of_their_own(client, served):
    add_rollout(served.store, NAME, BAD_MODELS["crash loop"])
    assert (
        "<code>crash-loop</code>: the version crashed again and again" in client.get(f"/rollouts/{NAME}").text
    )


def test_page_with_an_older_log_has_a_link_for_browsers_without_scripts(client, served, monkeypatch):
    add_rollout(served.store, NAME, CLEAN, days=0.01)
    assert "<noscript>" not in client.get(f"/rollouts/{NAME}").text
    is_read = threading.Event()
    monkeypatch.setattr(RolloutLog, "follow", lambda *_: is_read.wait(20))
    page = client.send("GET", f"/rollouts/{NAME}", None, {}).text
    is_read.set()
    link = page.partition("<noscript>")[2].partition("</noscript>")[0]
    assert f'<a href="/rollouts/{NAME}">Look again</a>' in link


def test_page_follows_the_log_as_it_grows(client, served):
    run = add_rollout(served.store, NAME, CLEAN, days=0.01)
    assert run.progress.state == "running"
    before = client.get(f"/rollouts/{NAME}").text
    answer = client.post(f"/rollouts/{NAME}/order", order="pause", note="lunch")
    after = client.follow(answer).text
    assert "admin paused: lunch" not in before
    assert "paused: lunch" in after
    assert orders(served, NAME) == ["pause"]


def test_abort_says_how_many_go_back_and_needs_the_name(client, served):
    run = add_rollout(served.store, NAME, CLEAN, devices=600, days=0.003)
    assert run.progress.started < 600
    exposed = sum(one.state in ("started", "succeeded", "failed") for one in run.progress.members.values())
    page = client.get(f"/rollouts/{NAME}/abort")
    assert f"{exposed} devices go back" in words(page.text)
    assert f"{len(run.progress.members) - run.progress.started} never got it" in words(page.text)
    refused = client.post(f"/rollouts/{NAME}/order", order="abort", confirm="yes")
    assert refused.status == 422
    assert orders(served, NAME) == []
    done = client.follow(client.post(f"/rollouts/{NAME}/order", order="abort", confirm=NAME, note="too slow"))
    assert done.status == 200
    assert orders(served, NAME) == ["abort"]
    with served.store.transaction() as session:
        RolloutRunner().turn(session, NOW)
    assert find_rollout(served.store, NAME).state == "aborted"


@pytest.mark.parametrize("order", ["resume", "explode", ""])
def test_order_that_does_not_fit_changes_nothing(order, client, served):
    add_rollout(served.store, NAME, CLEAN, days=0.01)
    assert client.post(f"/rollouts/{NAME}/order", order=order).status == 422
    assert orders(served, NAME) == []


def test_devices_of_a_rollout_are_listed_a_page_at_a_time(client, served):
    add_rollout(served.store, NAME, CLEAN, devices=250)
    first = client.get(f"/rollouts/{NAME}/devices").text
    seen = set(re.findall(r'href="/devices/([^"]+)"', first))
    assert len(seen) == 100
    following = re.search(r'href="([^"]+)" rel="next"', first)[1].replace("&amp;", "&")
    assert not seen & set(re.findall(r'href="/devices/([^"]+)"', client.get(following).text))


def test_plan_says_who_gets_what_and_starts_it_once(client, served):
    page = client.get(f"/rollouts/new?release={RELEASE}&selector=site%3Dlyon&waves=10%25,100%25")
    said = words(page.text)
    assert page.status == 200
    assert "What would happen" in said
    assert re.search(r"\d+ devices get it", said)
    assert "it runs detector 1.5.0 already" in said
    fields = dict(
        re.findall(
            r'type="hidden" name="(\w+)" value="([^"]*)"', page.text.partition('action="/rollouts"')[2]
        )
    )
    fields["name"] = re.search(r'name="name" value="([^"]+)"', page.text)[1]
    started = client.post("/rollouts", **fields)
    assert started.headers["location"] == f"/rollouts/{fields['name']}"
    assert client.follow(started).status == 200
    again = client.post("/rollouts", **fields)
    assert again.status == 422
    assert len([row for row in client.get("/rollouts").text.split("<tr>") if RELEASE in row]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"selector": "site="}, "selector"),
        ({"waves": "90%"}, "end with 100%"),
        ({"minimum": "some"}, "is no number"),
        ({"soak_min": "a"}, "is no number"),
        ({"release": "none"}, "no release"),
        ({"window": "at-night"}, "not of the form 01:00-04:00"),
    ],
)
def test_plan_that_cannot_be_keeps_the_form_and_says_why(change, said, client):
    query = "&".join(f"{name}={value}" for name, value in {"release": RELEASE, **change}.items())
    page = client.get(f"/rollouts/new?{query.replace('%', '%25')}")
    assert said in words(page.text)
    assert 'id="selector"' in page.text


def test_hostile_names_are_text(client, served):
    with served.store.transaction() as session:
        session.add(ReleaseRow(name="<script>x</script>", created_at=time.time(), note='"><img src=x>'))
    for path in ("/releases", "/rollouts/new", "/releases/%3Cscript%3Ex%3C%2Fscript%3E"):
        page = client.get(path).text
        assert "<script>x" not in page
        assert "<img src=x" not in page


def test_release_shows_evidence_deltas_and_where_it_went(client, served):
    add_rollout(served.store, NAME, CLEAN)
    said = words(client.get(f"/releases/{NAME}-release").text)
    assert "accuracy 0.971, source model 0.975, 2,000 data samples" in said
    assert "310 kB coded file: 1.9 MB" in said
    assert "succeeded" in said


def test_withdrawal_needs_the_name_and_no_open_rollout(client, served):
    add_rollout(served.store, NAME, CLEAN, days=0.01)
    release = f"{NAME}-release"
    assert client.post(f"/releases/{release}/withdraw", confirm="").status == 422
    refused = client.post(f"/releases/{release}/withdraw", confirm=release)
    assert refused.status == 422
    assert "is used by rollout" in words(refused.text)


@pytest.mark.parametrize(
    "path", ["/rollouts/none", "/rollouts/none/abort", "/releases/none", "/rollouts/none/devices"]
)
def test_what_does_not_exist_is_not_found(path, client):
    assert client.get(path).status == 404


def test_model_health_draws_versions_of_each_class(client):
    page = client.get("/health?model=detector").text
    said = words(page)
    assert page.count('class="chart"') >= 9
    assert all(target in said for target in ("jetson-orin-nano", "rpi5", "x86-64"))
    assert "1.5.0" in said
    assert "1.4.0" in said
    assert client.get("/health?model=none").status == 200


def test_work_that_waits_is_forgotten_when_the_console_ends():
    closing, goes_on, done = ExitStack(), threading.Event(), []
    background = Background(closing)
    background.find("first", lambda: goes_on.wait(10) and done.append("first"))
    background.find("second", lambda: done.append("second"))
    threading.Timer(0.1, goes_on.set).start()
    closing.close()
    assert done == ["first"]


@pytest.mark.parametrize("what", ["release", "rollout"])
def test_name_of_a_form_is_refused(what):
    with pytest.raises(FleetError, match="'new' is an address of the console"):
        check_name(what, "new")


def test_outside_gate_shows_its_limit_and_hostile_evidence_as_text(client, served):
    gates = {
        "conversion": OutsideGate(limit=2.0, unit="<i>%</i>", judge="token:shop"),
        "calls": OutsideGate(),
    }
    add_rollout(served.store, NAME, CLEAN, evidence=gates)
    with served.store.transaction() as session:
        reason = "<script>alert(1)</script>"
        evidence = Evidence(gate="conversion", value=1.5, reason=reason, who="token:shop")
        log_entries(session, NAME, "token:shop", [evidence], NOW + 9e5)
    page = client.get(f"/rollouts/{NAME}").text
    assert "<script>alert" not in page and "<i>%" not in page
    said = html.unescape(words(page))
    assert "at most 2 token:shop" in said and "Conversion (<i>%</i>) is 1.5, expected at most 2" in said
    assert "the judge states it" in said and "awaited" in said
