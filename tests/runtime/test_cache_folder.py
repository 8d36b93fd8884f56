from pathlib import Path

import pytest

from edgekit_runtime.system.paths import find_cache_folder


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", "/data/cache")
    assert find_cache_folder() == Path("/data/cache")
    monkeypatch.delenv("EDGEKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert find_cache_folder() == Path("/xdg/edgekit")
