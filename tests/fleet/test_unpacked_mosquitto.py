"""The demo's broker where none is installed. Programs named apt-get and dpkg-deb stand for Debian's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgekit_fleet.demo.unpacked_mosquitto import provide_mosquitto
from edgekit_runtime.errors import ConfigError

APT = """#!/bin/sh
echo "$@" >> {log}
for word; do case $word in --option=Dir::Cache=*) cache=${{word#--option=Dir::Cache=}} ;; esac; done
case "$*" in *download-only*) touch "$cache/archives/mosquitto.deb" "$cache/archives/libcjson1.deb" ;; esac
"""
# A package's content: a program that tells where it looks for libraries, and a folder of these.
DPKG = """#!/bin/sh
mkdir -p "$3/usr/sbin" "$3/usr/lib/x86_64-linux-gnu"
printf '#!/bin/sh\\necho "$LD_LIBRARY_PATH|$*"\\n' > "$3/usr/sbin/mosquitto"
chmod +x "$3/usr/sbin/mosquitto"
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs: without mosquitto, apt-get and dpkg-deb."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("sh", "mkdir", "chmod", "touch"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edgekit_fleet.demo.unpacked_mosquitto.SYSTEM_FOLDERS", ())
    return folder


def test_missing_broker_is_unpacked_once_with_its_libraries(programs: Path, tmp_path: Path) -> None:
    log, said = tmp_path / "log", list[str]()
    script(programs / "apt-get", APT.format(log=log))
    script(programs / "dpkg-deb", DPKG)
    provide_mosquitto(said.append)
    result = subprocess.run(["mosquitto", "-c", "file"], capture_output=True, text=True, check=True)
    libraries, _, arguments = result.stdout.strip().partition("|")
    assert Path(libraries).is_dir() and arguments == "-c file"
    assert len(said) == 1 and "mosquitto, the broker, is not installed" in said[0]
    calls = log.read_text()
    os.environ["PATH"] = str(programs)
    provide_mosquitto(said.append)
    assert log.read_text() == calls and len(said) == 1


def test_machine_without_apt_is_told_in_one_sentence_what_to_install(programs: Path) -> None:
    with pytest.raises(ConfigError, match=r"the broker of a fleet, is not installed.*apt-get.*: install"):
        provide_mosquitto(lambda _: None)


def test_package_that_apt_does_not_get_is_tried_again_next_time(programs: Path) -> None:
    script(programs / "apt-get", "#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="apt-get: E: no network"):
            provide_mosquitto(lambda _: None)


def test_installed_broker_is_left_alone(programs: Path) -> None:
    script(programs / "mosquitto", "#!/bin/sh\n")
    provide_mosquitto(pytest.fail)
    assert shutil.which("mosquitto") == str(programs / "mosquitto")
