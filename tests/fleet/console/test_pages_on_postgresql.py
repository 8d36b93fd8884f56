"""The pages of the console, whose SQL runs on PostgreSQL too."""

import html
import re

import pytest
from tests.fleet.filled_store import fill_store

from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

_MOST_PAGES = 60
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
    seen, waiting = set(), ["/", "/devices", "/releases", "/rollouts", "/health", "/audit"]
    while waiting and len(seen) < _MOST_PAGES:
        address = waiting.pop(0)
        if address in seen or address.startswith("/static"):
            continue
        seen.add(address)
        answer = client.get(address)
        assert answer.status in (200, 303, 404), f"{address}: {answer.text[:500]}"
        if address != "/live":
            waiting += [
                html.unescape(each) for each in re.findall(r'(?:href|hx-get)="(/[^"]*)"', answer.text)
            ]
    assert len(seen) > 5
