"""A real PostgreSQL for tests and benchmarks: Debian's programs, a new cluster on loopback, a free port."""

import contextlib
import ctypes
import fcntl
import os
import pickle
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.free_port import free_port

_START_S = 30.0
_FIRST_WITH_STRATEGIES = 15  # of CREATE DATABASE
_PREFIX = "edgekit-postgresql-"
_SETTINGS = """\
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
fsync = {fsync}
full_page_writes = {fsync}
wal_level = replica
max_wal_senders = 4
max_connections = 150
shared_buffers = 32MB
max_wal_size = 256MB
autovacuum = off
logging_collector = off
{more}
"""


def find_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL of Debian; root installs it where it is missing."""
    for may_install in (True, False):
        found = sorted(
            Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4])
        )
        if found:
            return found[-1].parent
        if not may_install or os.geteuid() != 0 or shutil.which("apt-get") is None:
            return None
        command = ["apt-get", "install", "-y", "--no-install-recommends", "postgresql"]
        subprocess.run(command, check=False, capture_output=True, env={**os.environ, **_NO_QUESTIONS})
    return None


_NO_QUESTIONS = {"DEBIAN_FRONTEND": "noninteractive"}


def _end_with_parent() -> None:
    """Make the server stop where the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG


def _remove_stale() -> None:
    """Remove what was left by tests that were killed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/owner"):
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{int(owner.read_text())}").exists():
                shutil.rmtree(owner.parent, ignore_errors=True)


class PostgresqlServer:
    """A server with a cluster of its own, which ends with the `with` block.

    Attributes:
        port: on 127.0.0.1.
        folder: of the cluster, below `place`.
        version: the major one.
    """

    def __init__(self, *, is_durable: bool = False, settings: str = "", place: Path | None = None) -> None:
        """Make the cluster; it is started by `start`.

        Args:
            is_durable: whether it syncs to the disk; a test needs not.
            settings: further lines of its configuration.
            place: an empty folder for it; a temporary one by default.
        """
        programs = find_programs()
        if programs is None:
            pytest.skip(
                "PostgreSQL is not installed, and this user cannot install it: apt install postgresql"
            )
        self._programs, self.version = programs, int(programs.parts[4])
        self._user = None if os.geteuid() else "postgres"
        _remove_stale()
        self._place = Path(tempfile.mkdtemp(prefix=_PREFIX)) if place is None else place
        (self._place / "owner").write_text(str(os.getpid()))
        if self._user is not None:
            found = pwd.getpwnam(self._user)
            os.chown(self._place, found.pw_uid, found.pw_gid)
        self.folder, self.port = self._place / "data", free_port()
        self._password, self._settings = secrets.token_hex(8), settings
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PostgresqlServer":
        self._make_cluster()
        self.start()
        return self

    def _make_cluster(self) -> None:
        if not self.folder.exists():
            secret = self._place / "password"
            secret.write_text(self._password)
            secret.chmod(0o644)
            options = ["--auth=scram-sha-256", f"--pwfile={secret}", "--username=edgekit", "--no-sync"]
            self.run("initdb", "-D", str(self.folder), "--encoding=UTF8", "--locale=C", *options)
            secret.unlink()
        self.configure()

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._place, ignore_errors=True)

    def configure(self, more: str = "") -> None:
        """Write its configuration, which it reads at its next start."""
        fsync = "on" if self._is_durable else "off"
        text = _SETTINGS.format(port=self.port, fsync=fsync, more=f"{self._settings}\n{more}")
        (self.folder / "edgekit.conf").write_text(text)
        main = self.folder / "postgresql.conf"
        if "edgekit.conf" not in main.read_text():
            with main.open("a") as file:
                file.write("include 'edgekit.conf'\n")
        for path in (self.folder / "edgekit.conf", main):
            path.chmod(0o644)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, as libpq has it."""
        return f"postgresql://edgekit:{self._password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, and wait until it answers; children of one that was killed may take a moment to end."""
        give_up_s = time.monotonic() + _START_S
        ready = ["pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        self._start()
        while subprocess.run([self._programs / ready[0], *ready[1:]], check=False).returncode:
            if time.monotonic() > give_up_s:
                raise RuntimeError((self._place / "log").read_text()[-3000:])
            if self._process is None or self._process.poll() is not None:
                self._start()
            time.sleep(0.02)

    def restart_if_ended(self) -> bool:
        """Start it again if it has ended by itself; returns whether it had."""
        has_ended = self._process is None or self._process.poll() is not None
        if has_ended:
            self.start()
        return has_ended

    def _start(self) -> None:
        with (self._place / "log").open("ab") as log:
            command = [str(self._programs / "postgres"), "-D", str(self.folder)]
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._place,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  # it only calls the system
            )

    def start_for_many(self) -> IO[str]:
        """Start it for this process and those that `use` it; it ends with the last of them, even if killed.

        A lock on `users` ends with its process. A shell waits until no process has it, and ends the server.
        """
        (self._place / "users").touch()
        users = self.use()
        assert users is not None
        end = f"{self._programs}/pg_ctl stop -m immediate -D {self.folder}; rm -rf {self._place}"
        subprocess.run(
            ["sh", "-c", 'rm owner; flock users sh -c "$0" & echo $! >owner', end],
            user=self._user,
            cwd=self._place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        self._make_cluster()
        self.run("pg_ctl", "start", "-w", "-D", str(self.folder), "-l", str(self._place / "log"))
        return users

    def use(self) -> IO[str] | None:
        """Return a lock that keeps it running until it is closed; None if it has ended."""
        with contextlib.suppress(FileNotFoundError):
            users = (self._place / "users").open()
            fcntl.flock(users, fcntl.LOCK_SH)
            if Path(users.name).exists():
                return users
            users.close()
        return None

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT breaks connections off and writes what is open; SIGQUIT and SIGKILL are a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def pids(self) -> list[int]:
        """Return the process ids of the server and its children."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    @contextlib.contextmanager
    def make_copy(self) -> "Iterator[PostgresqlServer]":
        """Yield a copy that has each commit before its writer hears of it; the first server waits for it."""
        copy = PostgresqlServer(is_durable=self._is_durable)
        copy._password = self._password
        source = f"host=127.0.0.1 port={self.port} user=edgekit password={self._password}"
        self.run("pg_basebackup", "-D", str(copy.folder), "-d", source, "-R", "-X", "stream", "-c", "fast")
        with copy:
            self.configure("synchronous_standby_names = '*'")
            self.sql("SELECT pg_reload_conf()")
            while self.sql("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") != "1":
                time.sleep(0.05)
            yield copy

    def promote(self) -> None:
        """Let a copy take over."""
        self.sql("SELECT pg_promote()")

    def run(self, program: str, *arguments: str, data: bytes = b"") -> bytes:
        """Run a program of PostgreSQL as the user of the cluster; returns its output."""
        done = subprocess.run(
            [self._programs / program, *arguments],
            user=self._user,
            cwd=self._place,
            env={"PGPASSWORD": self._password, "PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            input=data,
            check=False,
            capture_output=True,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode()[-2000:]}")
        return done.stdout

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Run a statement; returns its rows as text."""
        options = ["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", str(self.port)]
        return self.run("psql", *options, "-U", "edgekit", "-c", statement, database).decode().strip()


@contextlib.contextmanager
def join_server(folder: Path, prepare: Callable[[PostgresqlServer], None]) -> Iterator[PostgresqlServer]:
    """Yield the server of all processes that name the same folder; the first starts and prepares it."""
    address = folder / "postgresql"
    with (folder / "postgresql.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = pickle.loads(address.read_bytes()) if address.exists() else None  # noqa: S301  # our file
        users = server.use() if server else None
        if users is None:
            server = PostgresqlServer()
            users = server.start_for_many()
            prepare(server)
            address.write_bytes(pickle.dumps(server))
    with users:
        yield server


@contextlib.contextmanager
def new_database(server: PostgresqlServer, template: str = "template1") -> Iterator[str]:
    """Yield the URL of a new database, which is dropped at the end."""
    import psycopg

    name = f"fleet_{secrets.token_hex(6)}"
    # A copy of files takes a tenth of the processor time of the log of all pages, which version 15 writes.
    strategy = "STRATEGY FILE_COPY" if server.version >= _FIRST_WITH_STRATEGIES else ""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
    try:
        yield server.url(name)
    finally:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
