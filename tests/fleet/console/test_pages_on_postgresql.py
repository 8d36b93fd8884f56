"""The pages of the console, whose SQL runs on PostgreSQL too."""

import html
import re
from collections import Counter

import pytest
from tests.fleet.filled_store import fill_store

from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

_MOST_PAGES = 40
_MOST_ALIKE = 4
_DEVICE = re.compile(r"[a-z]+-\d{5}")
_LINKS = re.compile(r'(?:href|hx-get)="(/[^"]*)"')


@pytest.fixture
def filled(postgresql_url, tmp_path):
    folder = FleetFolder(tmp_path / "filled")
    folder.write_settings(FleetSettings(store_url=postgresql_url))
    store = folder.open_store()
    fill_store(store, 60)
    store.close()
    return folder.path


def test_pages_that_pages_link_to_are_shown(client):
    """Up to `_MOST_ALIKE` of the pages that differ in their device alone."""
    seen, alike, waiting = set(), Counter(), ["/", "/devices", "/releases", "/rollouts", "/health", "/audit"]
    while waiting and len(seen) < _MOST_PAGES:
        address = waiting.pop(0)
        kind = _DEVICE.sub("", address)
        if address in seen or address.startswith("/static") or alike[kind] == _MOST_ALIKE:
            continue
        seen.add(address)
        alike[kind] += 1
        answer = client.get(address)
        assert answer.status in (200, 303, 404), f"{address}: {answer.text[:500]}"
        if address != "/live":
            waiting += [html.unescape(each) for each in _LINKS.findall(answer.text)]
    assert len(seen) > 5
