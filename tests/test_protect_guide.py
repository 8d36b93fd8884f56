"""The commands of docs/guide/protect.md, as a newcomer runs them, but those that need a TPM or a boot."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import runtime_server
from tests.runtime.conftest import PackageMaker, maker
from tests.runtime.encryption_parts import find_plaintext, make_heavy
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import environment

__all__ = ["maker"]

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "edgekit": [sys.executable, "-m", "edgekit_cli"],
    "edgekit-device": [sys.executable, "-m", "edgekit_runtime.cli"],
}


def read_commands() -> list[str]:
    text = (ROOT / "docs" / "guide" / "protect.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split()[0] in PROGRAMS and " fleet " not in line]


def test_guide_leads_to_an_encrypted_model_on_the_device(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy, secret = make_heavy(maker)
    write_keys(tmp_path / "keys")
    package = tmp_path / "kws-1.0.0-rpi5.edgepkg"
    heavy.write(package)
    for name, folder in {"HOME": "", "STATE": "state", "CACHE": "cache"}.items():
        monkeypatch.setenv(f"EDGEKIT_{name}", str(tmp_path / folder))
    output = ""
    for line in read_commands():
        command, _, target = line.partition(" > ")
        program, *arguments = command.split()
        is_device = program == "edgekit-device"
        process = (runtime_server().popen if is_device else subprocess.Popen)(
            [*PROGRAMS[program], *arguments],
            cwd=tmp_path,
            env=environment(tmp_path) if is_device else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate()
        assert process.returncode == 0, f"{line}: {errors}"
        if target:
            (tmp_path / target).write_text(output)
    assert "encrypted" in output  # of `status`, the last command
    assert "key of this device: " in output
    package.unlink()
    assert find_plaintext(tmp_path, secret) == []
