"""What this machine lacks for an emulated device or for power cuts is said, not met as a traceback."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hil.power_cuts import mounts

from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import open_bench
from edgekit_hil.drivers import constrained
from edgekit_runtime.errors import BenchUnavailableError, ConfigError


def refuse(*_: object, **__: object) -> object:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda patch, _: patch.setattr("sys.platform", "darwin"), "power cuts need Linux"),
        (lambda _, folder: (folder / "status").write_text("CapEff:\t0000000000000000\n"), "need root"),
        (lambda _, folder: (folder / "fuse").unlink(), "fuse, which is missing or not allowed here"),
        (lambda _, folder: (folder / "loop-control").unlink(), "loop-control, which is missing"),
        (lambda _, folder: forbid(folder / "fuse"), "fuse, which is missing or not allowed here"),
        (lambda patch, _: patch.setenv("PATH", "/none"), "apt-get install qemu-utils"),
    ],
    ids=["system", "root", "fuse", "loop", "forbidden", "qemu"],
)
def test_machine_without_what_power_cuts_need_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prepare: Callable[[pytest.MonkeyPatch, Path], None],
    message: str,
) -> None:
    (tmp_path / "status").write_text("CapEff:\t000001ffffffffff\n")
    for name in ("fuse", "loop-control"):
        (tmp_path / name).touch()
    prepare(monkeypatch, tmp_path)

    assert message in (mounts.find_obstacle(tmp_path / "status", tmp_path) or "")


def forbid(path: Path) -> None:
    """Make a path that root cannot open for writing either."""
    path.unlink()
    path.mkdir()


def test_constrained_bench_without_root_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", _without_cgroups(Path.mkdir))
    bench = find_bench("constrained")

    with (
        pytest.raises(
            BenchUnavailableError, match=r"bench 'constrained': .*needs root and a writable cgroup"
        ),
        open_bench(bench),
    ):
        pass


def test_limit_on_memory_without_a_writable_cgroup_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constrained, "MEMORY", tmp_path / "none")

    with pytest.raises(ConfigError, match="a limit on memory needs root and a writable cgroup"):
        constrained._limit_memory(1 << 20, tmp_path / "no" / "quota")


def _without_cgroups(mkdir: Callable[..., None]) -> Callable[..., None]:
    def make(path: Path, *arguments: object, **options: object) -> None:
        if path.is_relative_to("/sys/fs/cgroup"):
            refuse()
        mkdir(path, *arguments, **options)

    return make
