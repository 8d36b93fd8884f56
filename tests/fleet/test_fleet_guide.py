"""The commands of docs/guide/fleet.md, as they are written there, in three terminals.

Not as written: what would install wheels is replaced by this checkout, ports are free ones, and a search and
the time that a wave must be well are shorter.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.free_port import free_port
from tests.waiting import allow, wait_for

from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("mosquitto")]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide" / "fleet.md"
_LIMIT_S = 300.0  # for a command that hangs; a busy machine takes minutes for what takes seconds
SHORTER = {"--search-seconds 5": "--search-seconds 1", "--soak 5": "--soak 1"}
# `python3 -m venv env` makes an environment whose pip does nothing and whose runtime is this checkout.
VENV = f"""\
#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 9
mkdir -p "$3/bin"
printf '#!/bin/sh\\n' > "$3/bin/python"
cat > "$3/bin/edgekit-device" <<'END'
#!/bin/sh
[ "$1" = serve ] && set -- "$@" --port 0
export PYTHONPATH={shlex.quote(str(ROOT / "device_runtime"))}
exec {shlex.quote(sys.executable)} -m edgekit_runtime.cli "$@"
END
chmod +x "$3/bin/python" "$3/bin/edgekit-device"
"""


class Terminal:
    """A shell that is given one block of commands after the other."""

    def __init__(self, folder, environment):
        self.text = ""
        self._process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self.text += line

    def type(self, block):
        self._process.stdin.write(block + "\n")
        self._process.stdin.flush()

    def run(self, block):
        """Run a block to its end and return what it printed; each command must succeed."""
        begin, end = len(self.text), f"ended-{len(self.text)}"
        commands = block.replace("\\\n", " ").splitlines()
        checked = [line if line.endswith("&") else f"{line} || echo failed-$?: {line!r}" for line in commands]
        self.type("\n".join([*checked, f"echo {end}"]))
        limit_s = time.monotonic() + _LIMIT_S
        while f"{end}\n" not in self.text[begin:] and time.monotonic() < limit_s:
            time.sleep(0.02)
        printed = self.text[begin:]
        assert f"{end}\n" in printed and "failed-" not in printed, f"{block}\n\n{self.text}"
        return printed

    def close(self):
        group = self._process.pid
        for number, limit_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0)):
            end_s = time.monotonic() + limit_s
            with contextlib.suppress(ProcessLookupError):  # all of the group have ended
                os.killpg(group, number)
                while time.monotonic() < end_s:
                    self._process.poll()
                    os.killpg(group, 0)
                    time.sleep(0.05)
        self._process.wait(10)
        self._reader.join(10)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def clone():
    """A folder that looks like a clone; its path is short, as that of a Unix socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ekg") as path:
        folder = Path(path)
        (folder / "edgekit").symlink_to(ROOT / "edgekit")
        (folder / "models").symlink_to(ROOT / "models")
        for name, text in (("scripts/wheels", "#!/bin/sh\n"), ("bin/python3", VENV)):
            (folder / name).parent.mkdir()
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        settings = FleetSettings(broker_port=free_port(), web_port=free_port(), console_port=free_port())
        FleetFolder(folder / "fleet").write_settings(settings)
        yield folder


@pytest.fixture
def terminals(clone):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEKIT", "PYTHON"))}
    environment = {
        **kept,
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "EDGEKIT_FLEET": str(clone / "fleet"),
        **{f"EDGEKIT_{name}": str(clone / "host" / name) for name in ("HOME", "STATE", "CACHE")},
    }
    allow(4 * _LIMIT_S)
    opened = [Terminal(clone, environment) for _ in range(3)]
    try:
        yield opened
    finally:
        for terminal in reversed(opened):
            terminal.close()


def test_guide_from_two_versions_to_a_rollback_and_a_bundle(terminals):
    manager, second, device = terminals
    guide = GUIDE.read_text()
    for written, shorter in SHORTER.items():
        assert written in guide
        guide = guide.replace(written, shorter)
    blocks = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    printed = []
    for block in map(str.strip, blocks):
        if block == "./edgekit fleet up":
            manager.type(block)
            wait_for(lambda: "Next, in another terminal" in manager.text, "the fleet", _LIMIT_S)
        elif "edgekit-device" in block or block == "kill %2":
            (code,) = re.findall(r"127\.0\.0\.1:\d+/\w+/\S+", "".join(printed)) or [""]
            device.run(block.replace("CODE", code))
        else:
            printed.append(second.run(block))
    text = "".join(printed)
    assert "first-r1: succeeded" in text
    after = text.rsplit("second-r1: succeeded", 1)[1]
    update, rest = after.split("d1 runs digits_cnn 1.1.0, as it should", 1)
    assert "d1 runs" not in update
    assert "d1 runs digits_cnn 1.0.0, as it should" in rest
    bundle = rest.split("second.bundle")[1]
    assert "second-r2: succeeded" in bundle and "d1 runs digits_cnn 1.1.0, as it should" in bundle
