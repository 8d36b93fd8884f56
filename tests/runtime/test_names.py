import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.package.member_names import find_name_problem, find_names_problem


@pytest.mark.parametrize("name", ["model.onnx", "golden/x_0.bin", "a/b/c", "v1.2+rc-1", "_x", "console.txt"])
def test_a_plain_name_is_accepted(name: str) -> None:
    assert find_name_problem(name) is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("", "a" * 256), "characters long, expected 1 to 255"),
        ((".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", ".hidden", "-rf", "x."), "has the part"),
        (("a\\b", "C:\\x", "C:x", "a:b", "a\0b", "a b", "a\nb", "x ", "~", "$HOME", "a*"), "has the part"),
        (("é", "\u2024\u2024/x", "%2e%2e"), "has the part"),
        (("con", "CON.txt", "a/nul", "lpt1.bin"), "is a device on Windows"),
    ],
)
def test_a_tricky_name_is_refused_with_the_reason(names: tuple[str, ...], reason: str) -> None:
    assert [name for name in names if reason not in (find_name_problem(name) or "")] == []


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "b", "a"], "stands twice"),
        (["Model.onnx", "model.onnx"], "differ only in case"),
        (["A/x", "a/y"], "differ only in case"),
        (["a", "a/b"], "is a file and a folder"),
        (["a/b", "A"], "differ only in case"),
        (["ok", "../bad"], "'../bad'"),
    ],
)
def test_names_that_collide_are_refused(names: list[str], reason: str) -> None:
    assert reason in (find_names_problem(names) or "")


def test_names_in_shared_folders_are_accepted() -> None:
    assert find_names_problem(["a/b", "a/c", "ab", "a/d/e"]) is None


@pytest.mark.parametrize("length", [1, 255])
def test_a_name_at_a_bound_of_its_length_is_accepted(length: int) -> None:
    assert find_name_problem("a" * length) is None


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_name_beyond_a_bound_of_its_length_is_refused_with_it(length: int) -> None:
    assert find_name_problem("a" * length) == f"is {length} characters long, expected 1 to 255"


@cases(
    "device",
    ["con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10))],
)
def test_a_device_of_windows_is_refused_in_every_folder_and_with_every_extension(device: str) -> None:
    names = (device, device.upper(), f"{device}.tar.gz", f"a/{device}/b", f"a/{device}")
    assert [name for name in names if "is a device on Windows" not in (find_name_problem(name) or "")] == []


@pytest.mark.parametrize("name", ["com", "lpt", "com10", "xcon", "con_", "a.con", "conx.txt"])
def test_a_name_that_only_looks_like_a_device_is_accepted(name: str) -> None:
    assert find_name_problem(name) is None


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["b", "a", "a/x", "b/x"], "name 'a' is a file and a folder"),
        (["a/b", "a/b/c"], "name 'a/b' is a file and a folder"),
        (["x/Y/a", "x/y/b"], "names 'x/Y' and 'x/y' differ only in case"),
        (["a", "b", "b"], "name 'b' stands twice"),
        ([], None),
    ],
)
def test_a_collision_is_refused_with_its_names(names: list[str], problem: str | None) -> None:
    assert find_names_problem(names) == problem
