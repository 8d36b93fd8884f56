"""Every setting of the service: a value is refused in the file's words, or the service can work with it."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.http.connection import ticks
from edgekit_runtime.service.options.config import ServiceConfig, read_config
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions


def list_settings(kind: type[Any], table: str = "") -> list[tuple[str, str, bool]]:
    """Return table, name and whether it is a number, of each setting in `kind` and in its tables."""
    found = []
    for name, hint in get_type_hints(kind).items():
        path = f"{table}.{name}".lstrip(".")
        if name == "models":
            found += list_settings(ModelOptions, "models.a")
        elif name == "streams":
            found += list_settings(StreamOptions, "streams.a")
        elif name == "governor":
            found += list_settings(GovernorOptions, path)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += list_settings(hint, path)
        else:
            found.append((table, name, bool({int, float} & {hint, *get_args(hint)})))
    return found


SETTINGS = [(table, name) for table, name, _ in list_settings(ServiceConfig)]
NUMBERS = [(table, name) for table, name, is_number in list_settings(ServiceConfig) if is_number]


def read(folder: Path, table: str, name: str, value: str) -> ServiceConfig:
    path = folder / "service.toml"
    needed = {"streams.a": {"model": "'m'", "source": "'0'"}}.get(table, {})  # they have no default
    lines = [f"{key} = {stated}" for key, stated in {**needed, name: value}.items()]
    path.write_text("\n".join([f"[{table}]", *lines, ""]), encoding="utf-8")
    return read_config(path)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1000", "1e300", "9" * 400, "-" + "9" * 400])
def test_number_that_no_setting_can_mean_is_refused_by_its_name(tmp_path: Path, value: str) -> None:
    wrong = []
    for table, name in NUMBERS:
        for stated in (value, f"[{value}]"):
            try:
                read(tmp_path, table, name, stated)
                message = "it is taken"
            except ConfigError as error:
                message = str(error)
            if not re.search(f"{table}: {name} is .*, expected ", message) or len(message) >= 500:
                wrong.append((table, name, stated, message))
    assert wrong == []


VALUES = st.one_of(
    st.floats().map(repr),
    st.integers().map(str),
    st.integers(-(10**30), 10**30).map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.text(max_size=20).map(json.dumps),
)


@settings(max_examples=4 * settings().max_examples)  # 400 in the long run
@given(st.sampled_from(SETTINGS), VALUES)
@example(("listen", "unix_socket"), r'"a\u0000b"')
@example(("models.a.scheduling", "levels"), "100000000")
@example(("models.a", "threads"), "100000")
@example(("models.a", "instances"), "100000000")
@example(("models.a.shadow", "comparison"), '"bogus"')
@example(("inference", "drain_timeout_s"), "-1")
@example(("http", "idle_timeout_s"), "1e9")
@example(("inference", "max_json_bytes"), "-1")
@example(("shared_memory", "max_regions"), "-1")
def test_value_of_any_setting_is_refused_or_passed_on_whole(
    tmp_path_factory: pytest.TempPathFactory, setting: tuple[str, str], value: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for stated in (value, f"[{value}]"):
        try:
            config = read(folder, *setting, stated)
        except ConfigError:
            continue
        plain = to_plain(config)
        assert from_plain(ServiceConfig, json.loads(json.dumps(plain, allow_nan=False))) == config
        check(plain)


def check(plain: Any, name: str = "") -> None:
    """Fail where a number is one that the system or a data structure cannot take."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            check(value, key)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            check(value, name)
    elif isinstance(plain, (int, float)):
        assert math.isfinite(plain)
        assert -(2**63) <= plain < 2**63
        assert name not in ("threads", "instances", "levels") or plain <= 256
        assert not name.endswith("_s") or 0 <= ticks(plain) < 2**62
    elif isinstance(plain, str):
        assert "\0" not in plain


@pytest.mark.parametrize(
    ("table", "name", "value", "expected"),
    [
        ("models.a", "threads", "257", "is 257, expected 1 to 256"),
        ("models.a", "swap", "'never'", "expected one of auto, availability, resource"),
        ("models.a.shadow", "comparison", "'bogus'", "expected one of agreement, similarity"),
        ("listen", "unix_socket", r'"a\u0000b"', "expected a string without NUL"),
        ("listen", "port", "70000", "is 70000, expected 0 to 65535"),
        ("models.a.gates", "alpha", "1", "is 1, expected more than 0 and less than 0.5"),
        ("models.a.governor", "threads", "[1, 257]", r"is \[1, 257\], expected 1 to 256"),
        ("models.a.scheduling", "max_passes", "0", "is 0, expected 1 to"),
        ("models.a", "load_timeout_s", "0", "is 0, expected 1e-06 to"),
        ("models.a", "sequence_idle_s", "0", "is 0, expected 0.001 to"),
        ("models.a.shadow", "max_pending", "0", "is 0, expected 1 to"),
        ("http", "max_body_bytes", "0", "is 0, expected 1 to"),
        ("http", "read_timeout_s", "0", "is 0, expected 0.001 to"),
        ("cache", "max_bytes", "0", "is 0, expected 1 to"),
        ("drift", "budget_s", "0", "is 0, expected 1e-09 to"),
        ("power", "battery_hours", "0", "is 0, expected 0.001 to"),
    ],
)
def test_refusal_says_what_is_expected(
    tmp_path: Path, table: str, name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"service\.toml: {table}: {name} .*{expected}"):
        read(tmp_path, table, name, value)
