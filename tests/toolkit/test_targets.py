import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import TargetError
from edgekit_toolkit.targets.figures import Figure, Source
from edgekit_toolkit.targets.loader import find_user_targets, list_targets, load_target, read_target
from edgekit_toolkit.targets.spec import Target

OURS = (
    "android-arm64",
    "jetson-agx-orin",
    "jetson-orin-nano",
    "rpi-zero-2w",
    "rpi4",
    "rpi5",
    "x86-64",
    "x86-64-avx2",
)
RPI5 = Path(list_targets.__code__.co_filename).with_name("rpi5.toml")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's file that starts as a copy of rpi5."""
    path = tmp_path / "targets" / "my-board.toml"
    path.parent.mkdir()
    path.write_text(RPI5.read_text().replace('name = "rpi5"', 'name = "my-board"'))
    return path


def edit(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, 1))
    return path


def test_shipped_targets_all_load() -> None:
    assert tuple(target.name for target in list_targets()) == OURS


@cases("name", OURS)
def test_shipped_estimates_and_measurements_say_how_they_came_about(name: str) -> None:
    target = load_target(name)
    for path, figure in target.figures():
        source = target.source(figure.source)
        told = source.derivation if figure.status in {"estimated", "measured"} else source.where
        assert told, path


@cases("name", OURS)
def test_shipped_sources_are_all_used(name: str) -> None:
    target = load_target(name)
    used = {figure.source for _, figure in target.figures()}
    used |= {target.quantization.source, *(release.source for release in target.releases)}
    assert {source.key for source in target.sources} == used


def test_alias_loads_the_target_it_stands_for() -> None:
    assert load_target("jetson") == load_target("jetson-orin-nano")


def test_tensorrt_targets_want_symmetric_int8_with_float_biases_and_own_pairs() -> None:
    for target in list_targets():
        if target.backend.default == "tensorrt":
            form = target.quantization
            assert (form.form, form.activations, form.quantized_bias, form.dedicated_qdq) == (
                "symmetric",
                "int8",
                False,
                True,
            )


def test_jetson_releases_name_python_and_tensorrt_of_each_jetpack() -> None:
    releases = {release.name: release for release in load_target("jetson").releases}
    assert releases["JetPack 6.2"].python == "3.10"
    assert dict(releases["JetPack 6.2"].engines)["tensorrt"] == "10.3.0"
    assert releases["JetPack 7.2"].python == "3.12"
    assert dict(releases["JetPack 7.2"].engines)["tensorrt"] == "10.16.2"


@pytest.mark.parametrize(
    ("typed", "meant"), [("jetsn", "jetson"), ("rpi-5", "rpi5"), ("X86-64", "x86-64"), ("rpi_5", "rpi5")]
)
def test_unknown_name_suggests_a_near_one(typed: str, meant: str) -> None:
    with pytest.raises(TargetError, match=rf"no target '{typed}'; did you mean .*{meant}"):
        load_target(typed)


def test_unknown_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(TargetError, match=r"no target 'qqqq'; expected one of android-arm64, android, "):
        load_target("qqqq")


def test_path_loads_a_users_file(own: Path) -> None:
    assert load_target(str(own)).name == "my-board"


def test_users_folder_is_searched_by_name(own: Path) -> None:
    assert load_target("my-board", [own.parent]).name == "my-board"
    assert "my-board" in {target.name for target in list_targets([own.parent])}


def test_users_file_takes_the_place_of_ours(own: Path) -> None:
    mine = own.with_name("rpi5.toml")
    mine.write_text(RPI5.read_text().replace("Raspberry Pi 5 (4 GB)", "Mine"))
    assert load_target("rpi5", [own.parent]).title == "Mine"
    assert [target.title for target in list_targets([own.parent]) if target.name == "rpi5"] == ["Mine"]


def test_users_alias_is_found(own: Path) -> None:
    edit(own, 'name = "my-board"', 'name = "my-board"\naliases = ["board"]')
    assert load_target("board", [own.parent]).name == "my-board"


def test_missing_users_folder_is_passed_over(tmp_path: Path) -> None:
    assert load_target("rpi5", [tmp_path / "absent"]).name == "rpi5"


def test_edgekit_home_moves_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    assert find_user_targets() == tmp_path / "targets"


def test_users_folder_without_edgekit_home_lies_under_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EDGEKIT_HOME", raising=False)
    assert find_user_targets() == Path.home() / ".config" / "edgekit" / "targets"


def test_file_called_otherwise_than_its_target_is_refused(own: Path) -> None:
    other = own.rename(own.with_name("other.toml"))
    with pytest.raises(TargetError, match=r"other\.toml: name: expected 'other' .* got 'my-board'"):
        load_target("other", [other.parent])


def test_absent_path_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"absent\.toml: cannot be read: No such file"):
        load_target(str(tmp_path / "absent.toml"))


def test_name_with_dots_does_not_leave_the_folder(own: Path) -> None:
    with pytest.raises(TargetError, match=r"\.\./targets/my-board: cannot be read"):
        load_target("../targets/my-board", [own.parent])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"schema = ", "expected TOML"),
        (b"\xff\xfe", "expected TOML"),
        (b"", "schema is None, expected 1"),
    ],
)
def test_file_that_is_not_a_target_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(TargetError, match=rf"bad\.toml: {problem}"):
        read_target(path)


CORES = 'cores = { value = 4, unit = "1", status = "datasheet", source = "brief" }'


@cases(
    ("old", "new", "problem"),
    [
        ("schema = 1", "schema = 2", "schema is 2, expected 1"),
        (CORES, "", "cpu: 'cores' is missing"),
        (CORES, "cores = 4", "cpu.cores: expected a table, got a number"),
        (
            CORES,
            CORES.replace("4", "-4"),
            "cpu.cores: value is -4, expected 0 to 1e+18",
        ),
        (
            CORES,
            CORES.replace("4", "nan"),
            "cpu.cores: value is nan, expected 0 to 1e+18",
        ),
        (
            CORES,
            CORES.replace("4", "inf"),
            "cpu.cores: value is inf, expected 0 to 1e+18",
        ),
        (CORES, CORES.replace("4", "0"), "cpu.cores.value: expected more than 0, got 0"),
        (CORES, CORES.replace("4", "true"), "cpu.cores: value is True, expected a number"),
        (CORES, CORES.replace("4", '"4"'), "cpu.cores: value is '4', expected a number"),
        (CORES, CORES.replace("value = 4, ", ""), "cpu.cores: 'value' is missing"),
        (CORES, CORES.replace('"1"', '"B"'), "cpu.cores.unit: expected '1', got 'B'"),
        (
            CORES,
            CORES.replace('"datasheet"', '"guess"'),
            "cpu.cores: status is 'guess', expected one of datasheet, published, measured, estimated",
        ),
        (
            CORES,
            CORES.replace('"brief"', '"rumour"'),
            "cpu.cores.source: expected the key of one of [[sources]], got 'rumour'",
        ),
        (
            CORES,
            CORES.replace('"datasheet"', '"estimated"'),
            "cpu.cores.source: expected a source with `derivation` for a figure with status 'estimated'",
        ),
        (CORES, CORES.replace("value", "amount"), "cpu.cores: unknown setting 'amount'"),
        (
            CORES,
            CORES.replace(" }", ", note = 1 }"),
            "cpu.cores: unknown setting 'note', known are source, status, unit, value",
        ),
        (
            "[cpu]",
            "[cpu]\nsockets = 1",
            "cpu: unknown setting 'sockets', known are clock, cores, isa, model",
        ),
        ('isa = ["neon", "fp16", "dotprod"]', "isa = [1]", "cpu: isa is [1], expected a list of strings"),
        ("per_channel = true", "per_channel = 1", "quantization: per_channel is 1, expected true or false"),
        (
            'form = "asymmetric"\nactivations = "int8"',
            'form = "symmetric"\nactivations = "uint8"',
            "quantization.activations: expected int8 in the symmetric form, got 'uint8'",
        ),
        (
            'default = "ort"',
            'default = "magic"',
            "backend.default is 'magic', expected one of litert, openvino, ort, tensorrt",
        ),
        (
            'default_mode = "default"',
            'default_mode = "turbo"',
            "power.default_mode: expected one of default, got 'turbo'",
        ),
        (
            "active = { value = 8.5",
            "active = { value = 1.5",
            "power.modes.default.active: expected at least idle (2.4 W), got 1.5",
        ),
        (
            "free = { value = 3000000000",
            "free = { value = 9e9",
            "memory.free: expected at most total (4294967296.0), got 9000000000.0",
        ),
        ("uncertainty = { value = 2", "uncertainty = { value = 0.5", "costs.uncertainty: expected a factor"),
        ('arch = "aarch64"', 'arch = "riscv64"', "arch is 'riscv64', expected one of aarch64, x86_64"),
        ('name = "my-board"', 'name = "My Board"', "name: expected lower-case words"),
        ('python = "3.11"', 'python = "2.7"', "releases[0].python: expected 3.N or none, got '2.7'"),
        (
            'date = "2025"',
            'date = "soon"',
            "sources[0].date: expected YYYY, YYYY-MM or YYYY-MM-DD, got 'soon'",
        ),
        ('key = "reserve"', 'key = "brief"', "sources: expected distinct keys"),
    ],
)
def test_malformed_field_is_refused_with_file_field_expected_and_got(
    own: Path, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = edit(Path(shutil.copy(own, tmp_path)), old, new)
    with pytest.raises(TargetError, match=re.escape(f"{path}: {problem}")):
        read_target(path)


def test_instructions_of_the_cpu_may_be_left_out(own: Path) -> None:
    edit(own, re.findall(r"^isa = .*$", own.read_text(), re.MULTILINE)[0], "")
    assert read_target(own).cpu.isa == ()


def test_figure_that_is_a_whole_number_in_toml_is_a_float() -> None:
    assert isinstance(load_target("rpi5").cpu.cores.value, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figure_that_is_no_amount_cannot_be_made(value: float) -> None:
    with pytest.raises(TargetError, match="expected a finite number"):
        Figure(value, "W", "measured", "bench")


def test_source_without_place_or_derivation_cannot_be_made() -> None:
    with pytest.raises(TargetError, match="expected a place or a derivation"):
        Source("k", "title", "2026")


def test_target_with_a_figure_of_unknown_source_cannot_be_made() -> None:
    target: Target = load_target("rpi5")
    with pytest.raises(TargetError, match=r"memory\.total\.source"):
        replace(target, sources=target.sources[1:])


def test_precision_without_kernels_counts_as_fp32() -> None:
    costs = load_target("rpi5").costs
    assert costs.fp16 is None
    assert costs.macs_per_s("fp16") == costs.macs_per_s("fp32")
