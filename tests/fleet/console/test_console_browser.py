"""The console in a real browser: every page in both themes and on a phone, by keyboard alone, and live.

EDGEKIT_PICTURES=docs/guide/console scripts/test tests/fleet/console/test_console_browser.py -k photographed
makes new pictures for the documentation.
"""

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from tests.chromium import BROWSER, browser  # noqa: F401 - a fixture
from tests.fleet.console.conftest import PASSWORD
from tests.fleet.console.rollout_sample import add_rollout
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN

from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.store.tables import DeviceRow, LoginRow

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")

AXE = "axe-core@4.14.1"
STOPPED, OPEN = "detector-1.6.0-r1", "keywords-1.1.0-r1"
PAGES = {
    "fleet": "/",
    "devices": "/devices?selector=class%3Djetson",
    "device": "/devices/{diverged}",
    "revoke": "/devices/{diverged}/revoke",
    "releases": "/releases",
    "release": "/releases/2026-11-16.1",
    "upload": "/releases/new",
    "rollouts": "/rollouts",
    "rollout": "/rollouts/{stopped}",
    "abort": "/rollouts/{open}/abort",
    "plan": "/rollouts/new?release=2026-11-16.1&selector=site%3Dlyon",
    "health": "/health",
    "audit": "/audit",
    "users": "/settings",
    "tokens": "/settings/tokens",
    "enrolment": "/settings/codes",
    "settings": "/settings/fleet",
    "error": "/devices/nobody",
}
PICTURES = ("fleet", "devices", "device", "rollout")
OVERFLOW = """[...document.querySelectorAll('main *, header *')]
  .filter(e => !e.closest('.scroll, svg, nav, .hidden') && e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + '.' + e.className).slice(0, 5)"""
FOCUS = """(e => e === document.body ? null : {
  name: (e.getAttribute('aria-label') || e.innerText || e.name || e.id).trim(),
  isSeen: getComputedStyle(e).outlineStyle !== 'none' && e.getBoundingClientRect().width > 0})
  (document.activeElement)"""


@pytest.fixture(scope="session")
def axe():
    """Return the source of axe-core, which is fetched once and kept outside of the project."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgekit-tests"
    path = cache / f"{AXE.replace('@', '-')}.js"
    if not path.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is needed to fetch axe-core")
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["npm", "pack", AXE], cwd=cache, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"axe-core cannot be fetched: {done.stderr[-200:]!r}")
        archive = cache / f"{AXE.replace('@', '-')}.tgz"
        with tarfile.open(archive) as packed:
            path.write_bytes(packed.extractfile("package/axe.min.js").read())
        archive.unlink()
    return path.read_text()


@pytest.fixture
def addresses(served):
    """Return page -> address, with rollouts and a device that needs attention."""
    add_rollout(served.store, STOPPED, BAD_MODELS["-5 points, no labels"], at=time.time() - 50_000)
    add_rollout(served.store, OPEN, CLEAN, devices=300, at=time.time() - 4000, days=0.04)
    with served.store.snapshot() as session:
        name = session.query(DeviceRow.name).filter_by(status="diverged").order_by(DeviceRow.name).first()[0]
    return {
        page: served.address + path.format(diverged=name, stopped=STOPPED, open=OPEN)
        for page, path in PAGES.items()
    }


@pytest.fixture
def tab(browser, served, client):  # noqa: F811
    """Return a tab whose user has logged in."""
    page = browser.new_page()
    login = f"{LOGIN}_{served.port}"
    page.send("Network.setCookie", name=login, value=client.cookies[login], url=served.address)
    yield page
    page.close()


def test_every_page_is_clean_in_both_themes_and_fits_a_phone(tab, addresses, axe):
    faults = []
    for name, address in addresses.items():
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
            tab.set_view(width, 844 if width < 600 else 900, scheme=scheme)
            tab.open(address)
            wide = tab.run(OVERFLOW)
            if wide or tab.run("document.documentElement.scrollWidth > innerWidth"):
                faults.append(f"{name} {scheme} {width}: too wide: {wide}")
            if width < 600 and name not in ("fleet", "device"):
                continue
            tab.run(axe + "; 0")
            only = ", runOnly: ['color-contrast']" if scheme == "dark" else ""
            result = tab.run(
                f"axe.run({{resultTypes: ['violations']{only}}}).then(r => r.violations.map(v =>"
                " [v.impact, v.id, v.nodes.map(n => n.target.join(' ')).slice(0, 3)]))"
            )
            faults += [
                f"{name} {scheme} {width}: {one}" for one in result if one[0] in ("serious", "critical")
            ]
        expected = [line for line in tab.messages if "404" not in line or name != "error"]
        faults += [f"{name}: {line}" for line in expected]
        tab.messages.clear()
    assert not faults, "\n".join(faults)


def test_order_of_an_ended_login_is_confirmed_after_the_next_one(tab, addresses, served):
    tab.set_view(1280)
    tab.open(addresses["revoke"])
    device = addresses["device"].rpartition("/")[2]
    tab.type("#why", "stolen on the train")
    with served.store.transaction() as session:
        session.query(LoginRow).update({"expires_at": 1.0})
    tab.click("main button")
    tab.wait("main", "Your login has ended, so nothing was done yet.")
    tab.type("#name", "maria")
    tab.type("#password", PASSWORD)
    tab.click("main button")
    tab.wait("main", "stolen on the train")
    assert tab.run(OVERFLOW) == []
    tab.click("main button", "Do it now")
    tab.wait("main", f"{device} was revoked at 20")
    assert [line for line in tab.messages if "401" not in line] == []


def test_keyboard_alone_logs_in_filters_and_revokes(browser, served):  # noqa: F811
    page = browser.new_page()
    page.set_view(1280)

    def tab_to(text, limit=60):
        for _ in range(limit):
            page.press("Tab")
            focus = page.run(FOCUS)
            if focus is None:
                continue
            assert focus["isSeen"], focus
            if text in focus["name"]:
                return
        raise AssertionError(f"no way by keyboard to {text!r}")

    page.open(served.address + "/devices")
    page.send("Input.insertText", text="maria")
    page.press("Tab")
    page.send("Input.insertText", text=PASSWORD)
    page.press("Enter", leaves=True)
    page.wait("h1", "Devices")
    page.press("Tab")
    assert page.run(FOCUS)["name"] == "Skip to the content"
    page.press("Enter")
    tab_to("selector")
    page.send("Input.insertText", text="site=lyon and status=converged")
    page.press("Enter", leaves=True)
    tab_to("lyon-")
    page.press("Enter", leaves=True)
    tab_to("Revoke lyon-")
    page.press("Enter", leaves=True)
    page.wait("h1", "Revoke lyon-")
    page.send("Input.insertText", text="lost on the way")
    page.press("Enter", leaves=True)
    page.wait(".notice", "is revoked")
    assert page.messages == []
    page.close()


def test_open_list_follows_the_store(tab, served):
    tab.open(served.address + "/devices?selector=name%3D*-0001*")
    tab.wait("#live-word", "Live")
    name = tab.text("tbody th")
    tab.run("document.querySelector('tbody th a').focus()")
    with served.store.transaction() as session:
        row = session.get(DeviceRow, name)
        row.status, row.because, row.is_online, row.last_seen_at = "stale", "just now", True, time.time()
    tab.wait("tr", "just now")
    assert tab.run("document.activeElement.innerText") == name, "the part keeps the focus"
    assert tab.messages == []


def test_hidden_tab_learns_what_it_missed(tab, served):
    tab.open(served.address + "/audit")
    tab.wait("#live-word", "Live")
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s});"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    tab.run(hide % "true" + event)
    with served.store.transaction() as session:
        from edgekit_fleet.store import audit

        audit.record(session, "somebody", "device.tag", "while-hidden")
    time.sleep(0.5)
    assert not tab.find("td", "while-hidden")
    tab.run(hide % "false" + event)
    tab.wait("td", "while-hidden")


def test_page_that_gets_no_events_says_so(tab, served):
    served.console.watcher.max_listeners = 0
    tab.open(served.address + "/audit")
    tab.wait("#live-word", "Not live: reload the page")


def test_pages_are_photographed(tab, addresses, tmp_path):
    folder = Path(os.environ.get("EDGEKIT_PICTURES", tmp_path))
    for name in PICTURES:
        for kind, width, scheme in (("", 1280, "light"), ("-dark", 1280, "dark"), ("-phone", 390, "light")):
            if folder != tmp_path and kind and name != "fleet":
                continue
            tab.set_view(width, 844 if width < 600 else 860, scheme=scheme)
            tab.open(addresses[name])
            tab.wait("#live-word", "Live")
            path = folder / f"{name}{kind}.png"
            tab.photograph(path, whole=folder == tmp_path)
            shrink(path)
            assert path.stat().st_size > 5000


def shrink(path):
    """Write a picture with 96 colours: a third of its size."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        picture.convert("RGB").quantize(96, method=image.Quantize.MAXCOVERAGE).save(path, optimize=True)
