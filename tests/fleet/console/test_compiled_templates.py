"""Compiled templates beside Python's bytecode: never old ones, and none is needed."""

import sys

import pytest

from edgekit_fleet.console.compiled_templates import open_templates


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Where compiled templates lie."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "compiled"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # whatever the environment says
    return tmp_path / "compiled"


@pytest.fixture
def show(tmp_path):
    """Return what a new process shows of a template."""

    def render(source):
        folder = tmp_path / "templates"
        folder.mkdir(exist_ok=True)
        (folder / "page.html").write_text(source)
        return open_templates(folder).get_template("page.html").render(name="<ann>")

    return render


def list_files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_template_is_compiled_once_until_its_source_changes(compiled, show):
    texts = [show("{{ name }}"), show("{{ name }}")]
    (file,) = list_files(compiled)
    before = file.stat().st_ino
    assert [*texts, show("{{ name }}")] == ["&lt;ann&gt;"] * 3
    assert file.stat().st_ino == before
    assert show("{{ name }}!") == "&lt;ann&gt;!"
    assert [path.stat().st_ino for path in list_files(compiled)] != [before]


@pytest.mark.parametrize("count", [0, 3, 18, 30, -1])
def test_damaged_file_is_replaced(compiled, show, count):
    show("{{ name }}")
    (file,) = list_files(compiled)
    whole = file.read_bytes()
    file.write_bytes(whole[:count])
    assert show("{{ name }}") == "&lt;ann&gt;"
    assert file.read_bytes() == whole


def test_folder_that_takes_no_files_does_no_harm(compiled, show):
    compiled.write_bytes(b"a file is there")
    assert show("{{ name }}") == "&lt;ann&gt;"


def test_user_who_wants_no_bytecode_gets_none(compiled, show, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert show("{{ name }}") == "&lt;ann&gt;"
    assert not compiled.exists()
