"""Promises that the repository makes about itself: clean files, complete pins, links that lead somewhere."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.compression_pictures import FOLDER, PICTURES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SELF = "tests/test_repository.py"  # names what it forbids
LOCK_FILES = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "package-lock.json", "yarn.lock"}
# Addresses of package indexes, and paths of one machine: a clone must depend on neither.
FORBIDDEN = re.compile(
    r"pyp[i]\.org|pythonhoste[d]\.org|npm[j]s\.(?:org|com)|de[b]\.debian\.org|nvc[r]\.io|ng[c]\.nvidia"
    r"|/wor[k]/(?:main|shared)|/roo[t]/|file:///[a-z]|^--(?:extra-)?index-url|^--find-links",
    re.MULTILINE,
)
# What the requirement files must serve.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
KINDS = ("host", "fleet", "hil", "dev", "device", "device-litert", "device-openvino")


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        return []
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


TRACKED = tracked_files()
needs_git = pytest.mark.skipif(not TRACKED, reason="not a git checkout")


def texts() -> Iterator[tuple[str, str]]:
    for name in TRACKED:
        content = (ROOT / name).read_bytes()
        if b"\0" not in content[:8192]:
            yield name, content.decode(errors="replace")


def pins(kind: str) -> list[tuple[Requirement, int]]:
    """Each pinned requirement of a file with the number of its hashes."""
    text = (ROOT / "requirements" / f"{kind}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(Requirement(line.split("--hash")[0]), line.count("--hash=sha256:")) for line in lines]


def installed(kind: str, python: str) -> dict[str, str]:
    """Name -> pinned version of what pip installs from a file with one Python on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    applying = [r for r, _ in pins(kind) if r.marker is None or r.marker.evaluate(environment)]
    names = [requirement.name for requirement in applying]
    assert len(names) == len(set(names)), "two versions of one package at once"
    return {requirement.name: str(requirement.specifier) for requirement in applying}


@needs_git
def test_tracked_files_name_no_index_and_no_path_of_a_machine() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        if name != SELF and FORBIDDEN.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


@needs_git
def test_no_lock_file_of_a_package_manager_is_tracked() -> None:
    assert [name for name in TRACKED if Path(name).name in LOCK_FILES] == []


@needs_git
def test_commands_are_executable_and_parse() -> None:
    scripts = ("check", "emulated-python", "lock", "test", "test-without-vnni")
    for name in ("edgekit", ".ci/run", *(f"scripts/{script}" for script in scripts)):
        assert os.access(ROOT / name, os.X_OK), name
        shell = "bash" if name == ".ci/run" else "sh"
        subprocess.run([shell, "-n", ROOT / name], check=True)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)", without_code(path.read_text()), flags=re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


@needs_git
def test_links_between_documents_lead_to_files_and_headings() -> None:
    broken = []
    for name, text in texts():
        if not name.endswith(".md"):
            continue
        prose = re.sub(r"`[^`]*`", "", without_code(text))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", prose):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            leads = path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))
            broken += [] if leads else [f"{name}: {target}#{anchor}"]
    assert broken == []


def test_decision_records_have_a_number_of_their_own_and_say_it() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [path.name[:4] for path in records]
    assert len(set(numbers)) == len(numbers), numbers
    for path, number in zip(records, numbers, strict=True):
        assert path.read_text().startswith(f"# {number}: "), path.name


def test_changelog_fragments_name_their_kind() -> None:
    fragments = [path for path in (ROOT / "changelog" / "unreleased").iterdir() if path.name != ".gitkeep"]
    pattern = re.compile(r"[a-z0-9][a-z0-9-]*\.(added|changed|fixed|removed|security)\.md")
    assert [path.name for path in fragments if not pattern.fullmatch(path.name)] == []
    assert [path.name for path in fragments if not path.read_text().strip()] == []


@pytest.mark.parametrize("kind", [*KINDS, "tensorrt"])
def test_every_requirement_is_one_version_with_hashes(kind: str) -> None:
    found = pins(kind)
    assert found
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes >= 1, requirement


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("smaller", "larger"), [("host", "fleet"), ("host", "hil"), ("fleet", "dev"), ("hil", "dev")]
)
def test_larger_environment_holds_the_smaller_one_unchanged(smaller: str, larger: str, python: str) -> None:
    held = installed(larger, python)
    assert {name: held.get(name) for name in installed(smaller, python)} == installed(smaller, python)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", KINDS)
def test_excluded_packages_are_in_no_requirements_file(kind: str, python: str) -> None:
    lines = (ROOT / "requirements" / "excluded.in").read_text().splitlines()
    if kind in {"device-litert", "device-openvino"}:
        name = f"excluded-{kind.removeprefix('device-')}.in"
        lines += (ROOT / "requirements" / name).read_text().splitlines()
    excluded = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
    assert excluded
    assert not excluded & {canonicalize_name(name) for name in installed(kind, python)}


# Host: 20 before offload: solver, zstd, parser of the service. Fleet: database, web server, pages, passwords,
# MQTT and TUF. Hil: labgrid with what its drivers and its remote control need, and pytest.
@pytest.mark.parametrize(("kind", "limit"), [("host", 23), ("fleet", 41), ("hil", 45)])
@pytest.mark.parametrize("python", PYTHONS)
def test_environment_has_few_packages(kind: str, limit: int, python: str) -> None:
    assert len(installed(kind, python)) <= limit


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_compression_shows_the_figures_of_the_benchmarks(name: str) -> None:
    stale = f"run scripts/python -m benchmarks.compression_pictures: {name}.svg is not of these tables"
    assert (FOLDER / f"{name}.svg").read_text() == f"{PICTURES[name]()}\n", stale
