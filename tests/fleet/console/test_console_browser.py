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
from playwright.sync_api import expect
from tests.browser import NO_SCROLL_BARS, list_messages, set_view
from tests.fleet.console.conftest import PASSWORD
from tests.fleet.console.rollout_sample import add_rollout
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN

from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import DeviceRow, LoginRow

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
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.tagName + '.' + e.className).slice(0, 5)"""
IS_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
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
def tab(page, served, client):
    """Return a tab whose user has logged in."""
    login = f"{LOGIN}_{served.port}"
    page.context.add_cookies([{"name": login, "value": client.cookies[login], "url": served.address}])
    return page


def test_every_page_is_clean_in_both_themes_and_fits_a_phone(tab, addresses, axe, is_long):
    faults = []
    for name, address in addresses.items():
        has_dark = is_long or name in PICTURES  # pages share their colours
        views = [("light", 1280), *([("dark", 1280)] if has_dark else []), ("light", 390)]
        set_view(tab, 1280)
        tab.goto(address)
        tab.evaluate(axe + "; 0")
        for theme, width in views:
            set_view(tab, width, 844 if width < 600 else 900, theme=theme)
            wide = tab.evaluate(OVERFLOW)
            if wide or tab.evaluate(IS_WIDE):
                faults.append(f"{name} {theme} {width}: too wide: {wide}")
            if width < 600 and name not in ("fleet", "device"):
                continue
            only = ", runOnly: ['color-contrast']" if theme == "dark" else ""
            violations = tab.evaluate(
                f"axe.run({{resultTypes: ['violations']{only}}}).then(r => r.violations.map(v =>"
                " [v.impact, v.id, v.nodes.map(n => n.target.join(' ')).slice(0, 3)]))"
            )
            faults += [
                f"{name} {theme} {width}: {violation}"
                for violation in violations
                if violation[0] in ("serious", "critical")
            ]
        faults += [f"{name}: {line}" for line in list_messages(tab) if "404" not in line or name != "error"]
        tab.clear_console_messages()
        tab.clear_page_errors()
    assert not faults, "\n".join(faults)


def test_order_of_an_ended_login_is_confirmed_after_the_next_one(tab, addresses, served):
    set_view(tab, 1280)
    tab.goto(addresses["revoke"])
    device = addresses["device"].rpartition("/")[2]
    tab.fill("#why", "stolen on the train")
    with served.store.transaction() as session:
        session.query(LoginRow).update({"expires_at": 1.0})
    tab.click("main button")
    expect(tab.locator("main:visible")).to_contain_text("Your login has ended, so nothing was done yet.")
    tab.fill("#name", "maria")
    tab.fill("#password", PASSWORD)
    tab.click("main button")
    expect(tab.locator("main:visible")).to_contain_text("stolen on the train")
    assert tab.evaluate(OVERFLOW) == []
    tab.locator("main button", has_text="Do it now").click()
    expect(tab.locator("main:visible")).to_contain_text(f"{device} was revoked at 20")
    assert [line for line in list_messages(tab) if "401" not in line] == []


def test_keyboard_alone_logs_in_filters_and_revokes(page, served):
    set_view(page, 1280)
    keyboard = page.keyboard

    def tab_to(text, limit=60):
        for _ in range(limit):
            keyboard.press("Tab")
            focus = page.evaluate(FOCUS)
            if focus is None:
                continue
            assert focus["isSeen"], focus
            if text in focus["name"]:
                return
        raise AssertionError(f"no way by keyboard to {text!r}")

    def enter():
        with page.expect_navigation():
            keyboard.press("Enter")

    page.goto(served.address + "/devices")
    keyboard.type("maria")
    keyboard.press("Tab")
    keyboard.type(PASSWORD)
    enter()
    expect(page.locator("h1:visible")).to_contain_text("Devices")
    keyboard.press("Tab")
    assert page.evaluate(FOCUS)["name"] == "Skip to the content"
    keyboard.press("Enter")
    tab_to("selector")
    keyboard.type("site=lyon and status=converged")
    enter()
    tab_to("lyon-")
    enter()
    tab_to("Revoke lyon-")
    enter()
    expect(page.locator("h1:visible")).to_contain_text("Revoke lyon-")
    keyboard.type("lost on the way")
    enter()
    expect(page.locator(".notice:visible")).to_contain_text("is revoked")
    assert list_messages(page) == []


def test_open_list_follows_the_store(tab, served):
    tab.goto(served.address + "/devices?selector=name%3D*-0001*")
    expect(tab.locator("#live-word:visible")).to_have_text("Live")
    link = tab.locator("tbody th a").first
    name = link.inner_text()
    link.focus()
    with served.store.transaction() as session:
        row = session.get(DeviceRow, name)
        row.status, row.because, row.is_online, row.last_seen_at = "stale", "just now", True, time.time()
    expect(tab.locator("tr", has_text=name)).to_contain_text("just now")
    expect(tab.locator("tbody th a:focus")).to_have_text(name)  # the part keeps the focus
    assert list_messages(tab) == []


def test_hidden_tab_learns_what_it_missed(tab, served):
    other = tab.context.new_page()
    for page in (tab, other):
        page.goto(served.address + "/audit")
        expect(page.locator("#live-word:visible")).to_have_text("Live")
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s});"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    tab.evaluate(hide % "true" + event)
    with served.store.transaction() as session:
        audit.record(session, "somebody", "device.tag", "while-hidden")
    missed = "td >> text=while-hidden"
    expect(other.locator(missed)).to_be_visible()
    expect(tab.locator(missed)).to_have_count(0)
    tab.evaluate(hide % "false" + event)
    expect(tab.locator(missed)).to_be_visible()


def test_page_that_gets_no_events_says_so(tab, served):
    served.console.watcher.max_listeners = 0
    tab.goto(served.address + "/audit")
    expect(tab.locator("#live-word:visible")).to_have_text("Not live: reload the page")


def test_pages_are_photographed(tab, addresses, tmp_path, is_long):
    folder = Path(os.environ.get("EDGEKIT_PICTURES", tmp_path))
    for name in PICTURES if is_long or folder != tmp_path else PICTURES[:1]:
        for kind, width, theme in (("", 1280, "light"), ("-dark", 1280, "dark"), ("-phone", 390, "light")):
            if kind and name != "fleet" and not (is_long and folder == tmp_path):
                continue
            set_view(tab, width, 844 if width < 600 else 860, theme=theme)
            tab.goto(addresses[name])
            expect(tab.locator("#live-word:visible")).to_have_text("Live")
            path = folder / f"{name}{kind}.png"
            tab.screenshot(path=path, full_page=folder == tmp_path, style=NO_SCROLL_BARS)
            if folder != tmp_path:
                shrink(path)
            assert path.stat().st_size > 5000


def shrink(path):
    """Write a picture with 96 colours: a third of its size."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        picture.convert("RGB").quantize(96, method=image.Quantize.MAXCOVERAGE).save(path, optimize=True)
