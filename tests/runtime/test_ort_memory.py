import ctypes

import pytest

from edgekit_runtime.sessions.ort import OrtOptions, make_settings
from edgekit_runtime.sessions.ort_memory import lean_loading


class FakeLibrary:
    """A C library that notes what is asked of it."""

    def __init__(self):
        self.calls = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))

    def malloc_trim(self, pad):
        self.calls.append(("trim", pad))


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    return fake


def test_lean_session_has_an_arena_and_no_memory_pattern():
    settings = make_settings(OrtOptions())
    assert settings.enable_cpu_mem_arena
    assert not settings.enable_mem_pattern
    assert settings.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


def test_thresholds_are_low_inside_and_high_after_and_memory_is_given_back_between(library):
    with lean_loading():
        inside = dict(library.calls)
        library.calls.clear()
    assert inside == {-3: 64 * 1024, -1: 128 * 1024}
    assert library.calls == [("trim", 0), (-3, 32 * 1024 * 1024), (-1, 64 * 1024 * 1024)]


def test_failed_loading_restores_the_thresholds_too(library):
    with pytest.raises(RuntimeError), lean_loading():
        library.calls.clear()
        raise RuntimeError
    assert (-3, 32 * 1024 * 1024) in library.calls


def test_other_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # without mallopt
    with lean_loading():
        pass
