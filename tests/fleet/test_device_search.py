"""Search in the store finds what `Selector.matches` means, in the order of attention, page by page."""

import contextlib
import random

import pytest
from sqlalchemy import select
from sqlalchemy.dialects import sqlite
from tests.fleet.conftest import STORE_TEMPLATE
from tests.fleet.filled_store import fill_store
from tests.fleet.postgresql_server import new_database
from tests.toolkit.cases import cases

from edgekit_fleet.operations import devices
from edgekit_fleet.operations.device_search import ATTENTION, Search, count_devices, find_devices
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.selector_sql import compile_selector
from edgekit_fleet.rollouts.views import list_attributes, read_devices
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.tables import DeviceRow
from edgekit_runtime.errors import FleetError

TESTS = (
    *("all", "beta", "site", "pinned", "name", "class=jetson", "class=rpi5", "class!=rpi5", "online=yes"),
    *("site=lyon", "site!=lyon", "site in (lyon, nice)", "site not in (lyon, nice)", "site=l*", "site=?ice"),
    *(
        "site=[ln]*",
        "site='[!ln]*'",
        "site=[a-l]*",
        "site='[lyon'",
        "name=*-0001?",
        "name=lyon-*",
        "name=lyon",
    ),
    *(
        "status=faulty",
        "status in (diverged, stale)",
        "status=*ed",
        "online=*",
        "online=maybe",
        "runtime=0.1.0",
    ),
    *(
        "runtime=0.*",
        "model:detector=1.4.0",
        "model:keywords",
        "memory_bytes=8*",
        "target=x86-64",
    ),
    *("engines='onnxruntime,tensorrt'", "'site'=lyon", "site='new york'", "line=l[0-3]", "missing!=x"),
)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request, tmp_path_factory):
    """A filled store, which no test changes."""
    with contextlib.ExitStack() as opened:
        url = sqlite_url(tmp_path_factory.mktemp("store") / "fleet.db")
        if request.param == "postgresql":
            server = request.getfixturevalue("postgresql")
            url = opened.enter_context(new_database(server, STORE_TEMPLATE))
        store = opened.enter_context(contextlib.closing(open_store(url)))
        fill_store(store, 200)
        with store.snapshot() as session:
            names = [name for (name,) in session.query(DeviceRow.name).order_by(DeviceRow.name).limit(3)]
        for name in names:  # a tag hides a fact
            devices.tag(store, name, {"runtime": "0.1.0-dev", "owner": "mine"}, "test")
        yield store


def make_selectors(count):
    draw = random.Random(1)
    yield from TESTS
    for _ in range(count):
        one, two, three = draw.choices(TESTS, k=3)
        first, second = draw.choices(("and", "or"), k=2)
        yield f"{draw.choice(('', 'not '))}{one} {first} ({two} {second} not {three})"


def find_all(session, search, **options):
    found, after = [], ""
    while True:
        page = find_devices(session, search, after=after, limit=97, **options)
        found += page.rows
        if not page.after:
            return found
        after = page.after


@pytest.mark.parametrize("max_listed", [0, 5000])
def test_store_finds_what_a_selector_means(store, max_listed, is_long):
    with store.snapshot() as session:
        attributes = {row.name: list_attributes(row) for row in session.query(DeviceRow)}
        for text in list(make_selectors(24 if is_long else 6))[:: 1 if is_long else 5 if max_listed else 2]:
            selector = parse_selector(text)
            expected = {name for name, own in attributes.items() if selector.matches(own)}
            assert {view.name for view in read_devices(session, selector, ())} == expected, text
            counts = count_devices(session, Search(selector=text))
            assert sum(counts.values()) == len(expected), text
            for by_name in (False, True):
                found = [row.name for row in find_all(session, Search(selector=text), by_name=by_name)]
                assert set(found) == expected, text
                assert len(found) == len(expected), text
                again = find_all(
                    session, Search(selector=text), by_name=by_name, counts=counts, max_listed=max_listed
                )
                assert [row.name for row in again] == found, text


def test_page_of_a_frequent_version_makes_no_list_of_its_devices(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    with store.snapshot() as session:
        condition = compile_selector(session, parse_selector("model:detector=1.5.0"), lookup="index")
        statement = select(DeviceRow.name).where(DeviceRow.status == "faulty", condition)
        text = statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
        plan = [row[3] for row in session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
    store.close()
    assert plan[1:] == ["USING INDEX ix_device_attributes_name_value_device FOR IN-OPERATOR"], plan


def test_page_of_all_but_a_few_reads_the_index_for_its_own_devices_only(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    fill_store(store, 2000)
    with store.snapshot() as session:
        search = Search(selector="site!=lyon")
        counts = count_devices(session, search)
        steps = 0

        def count_step():
            nonlocal steps
            steps += 1

        connection = session.connection().connection.driver_connection
        connection.set_progress_handler(count_step, 1)
        page = find_devices(session, search, counts=dict.fromkeys(counts, 5000))
        connection.set_progress_handler(None, 0)
    store.close()
    assert len(page.rows) == 50
    assert steps < 20_000, steps


def test_what_needs_attention_comes_first(store):
    with store.snapshot() as session:
        rows = find_all(session, Search())
    keys = [(ATTENTION.index(row.status), not row.is_online, row.name) for row in rows]
    assert keys == sorted(keys)
    assert len(keys) == 200


def test_status_and_special_narrow_the_search(store):
    with store.snapshot() as session:
        new = find_all(session, Search(status="new"))
        silent = find_all(session, Search(special="silent"))
        expiring = find_all(session, Search(special="expiring"))
    assert {row.status for row in new} == {"new"}
    assert expiring
    assert not any(row.is_online or row.status == "revoked" for row in silent)


@cases("after", ["nonsense", "faulty:2:x", "::", "converged:1:" + "z" * 300])
def test_foreign_place_begins_somewhere_and_fails_never(store, after):
    with store.snapshot() as session:
        find_devices(session, Search(), after=after)


def test_malformed_selector_is_refused(store):
    with store.snapshot() as session, pytest.raises(FleetError, match="selector"):
        find_devices(session, Search(selector="site="))
