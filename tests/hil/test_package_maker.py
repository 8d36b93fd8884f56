"""Packages of benches, made by several runs at one time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgekit_hil.tests.models import PackageMaker
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.trust.trust_store import TrustStore


def test_runs_side_by_side_share_one_key_and_one_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    makers = PackageMaker(), PackageMaker()

    with ThreadPoolExecutor(2) as pool:
        made = [*pool.map(lambda one: one.make("italy_power_mlp", "x86-64", "ort"), makers)]

    assert made[0] == made[1]
    with read_package(made[0], TrustStore.from_folder(makers[0].home / "keys")) as opened:
        assert opened.manifest.name == "italy_power_mlp"
