"""A whole fleet on loopback, with a real mosquitto."""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from sqlalchemy import Engine
from tests.fleet.fleet_device import FleetDevice
from tests.fleet.new_fleet import copy_new_fleet
from tests.fleet.postgresql_server import join_server, new_database
from tests.free_port import free_port
from tests.memory_folder import tmp_path  # noqa: F401  # a fixture

from edgekit_fleet.access import users
from edgekit_fleet.operations import devices, running
from edgekit_fleet.store import database
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.fleet_folder import FleetSettings

STORE_TEMPLATE = "fleet_template"  # the name of a database that has the tables


def pytest_collection_modifyitems(config, items):
    """Run each third test on PostgreSQL, with its first parameters; the long run takes all there too."""
    if config.getoption("--long"):
        return
    functions, repeated = {}, []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("store_url") == "postgresql":
            of_file = functions.setdefault(item.path, [])
            if item.originalname in of_file or len(of_file) % 3:
                repeated.append(item)
            if item.originalname not in of_file:
                of_file.append(item.originalname)
    if repeated:
        config.hook.pytest_deselected(items=repeated)
        left_out = set(repeated)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def quick_digests():
    """Digest passwords a thousand times faster than a manager does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users, "hasher", PasswordHasher(1, 64, 1))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_stores(tmp_path_factory):
    """Begin new stores with tables that lie ready, and compile each statement once for all stores."""
    ready, real = tmp_path_factory.mktemp("store") / "fleet.db", database.create_engine
    dialects, statements = {}, {}

    def make_engine(url, **options):
        if url.get_backend_name() == "sqlite" and ready.exists() and not Path(url.database).exists():
            shutil.copyfile(ready, url.database)
        engine = real(url, **options)
        dialect = dialects.setdefault(engine.dialect.name, engine.dialect)
        return Engine(engine.pool, dialect, url, execution_options={"compiled_cache": statements})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "create_engine", make_engine)
        new = ready.with_name("new.db")
        open_store(sqlite_url(new)).close()
        new.rename(ready)
        yield


@pytest.fixture(scope="session")
def mosquitto():
    if shutil.which("mosquitto") or os.access("/usr/sbin/mosquitto", os.X_OK):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("mosquitto is not installed, and this user cannot install it: apt install mosquitto")
    done = subprocess.run(
        ["apt-get", "install", "-y", "--no-install-recommends", "mosquitto"],
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip(f"mosquitto cannot be installed: {done.stderr[-200:]!r}")


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory):
    """The running PostgreSQL of all workers, which no test stops; each test makes a database of its own."""
    pytest.importorskip("psycopg", reason="needs the extra: pip install 'edgekit-host[postgresql]'")
    folder = tmp_path_factory.getbasetemp()
    with join_server(
        folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder, make_template
    ) as server:
        yield server


def make_template(server):
    server.sql(f"CREATE DATABASE {STORE_TEMPLATE}")
    open_store(server.url(STORE_TEMPLATE)).close()


@pytest.fixture
def postgresql_url(postgresql):
    with new_database(postgresql, STORE_TEMPLATE) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request, tmp_path):  # noqa: F811
    """The URL of a new store, once of each kind."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql_url")
    return sqlite_url(tmp_path / "fleet.db")


@pytest.fixture
def store(store_url):
    opened = open_store(store_url)
    yield opened
    opened.close()


class Fleet:
    """A running fleet, whose loop turns on a thread of its own."""

    joins = False

    def __init__(self, folder, settings):
        self.folder, self.settings = folder, settings
        self.decide = lambda session, now: None
        self.failure = None

    def _decide(self, session, now):
        self.decide(session, now)

    @contextlib.contextmanager
    def up(self):
        with running.start(self.folder, self.settings, self._decide, joins=self.joins) as fleet:
            self.fleet, self.store, self.loop = fleet, fleet.store, fleet.loop
            self.authority = fleet.authority
            stop, started = asyncio.Event(), threading.Event()

            async def run():
                self.events = asyncio.get_running_loop()
                started.set()
                await fleet.loop.run(stop)

            def work():
                try:
                    asyncio.run(run())
                except BaseException as failure:
                    self.failure = failure

            self.thread = thread = threading.Thread(target=work)
            thread.start()
            started.wait(10)
            limit = time.monotonic() + 20
            while fleet.loop._link.connections == 0 and thread.is_alive() and time.monotonic() < limit:
                time.sleep(0.01)  # before that, a hello is lost
            try:
                yield self
            finally:
                with contextlib.suppress(RuntimeError):
                    self.events.call_soon_threadsafe(stop.set)
                thread.join(20)
                if self.failure is not None:
                    logging.getLogger(__name__).error("the manager ended: %r", self.failure)

    def device(self, name, **options):
        (invitation,) = devices.invite(
            self.store, self.settings, self.authority, (name,), actor="test", **options
        )
        pem = self.authority.certificate_path.read_text()
        return FleetDevice(self.folder.path / f"of-{name}", invitation, pem)

    def detail(self, name):
        return devices.describe(self.store, name)


@pytest.fixture
def fleet_settings(tmp_path, mosquitto):  # noqa: F811
    logging.getLogger("gmqtt").setLevel(logging.CRITICAL)
    settings = FleetSettings(broker_port=free_port(), web_port=free_port())
    return copy_new_fleet(tmp_path / "fleet"), settings


@pytest.fixture
def fleet(fleet_settings):
    with Fleet(*fleet_settings).up() as fleet:
        yield fleet
