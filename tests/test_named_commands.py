"""Each command that a message, a docstring or a page of the documentation names exists, with its options."""

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click

from edgekit_cli.cli import cli
from edgekit_cli.lazy_commands import LazyCommand
from edgekit_runtime import cli as device_cli

ROOT = Path(__file__).parents[1]
SOURCES = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "hil", "changelog", "deploy", "examples")
NAMED = re.compile(r"`(?:\./|env/bin/)?(edgekit|edgekit-device) ([a-z-][^`]*)`")
TYPED = re.compile(r"^(?:\./|env/bin/)(edgekit|edgekit-device) ([a-z-][^#|>&\n]*)", re.MULTILINE)
BEGUN = re.compile(r"[`/]edgekit(?:-device)?(?![\w./-])")
VALUE = "VALUE"


def list_texts() -> Iterator[tuple[str, str]]:
    """Return place and text of each string of the sources, and of each page."""
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        # To parse and walk the files without such a name takes five seconds.
        for node in ast.walk(ast.parse(text)) if BEGUN.search(text) else ():
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else VALUE for each in node.values)
                string = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                string = node.value
            else:
                continue
            if BEGUN.search(string):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", string
    for page in PAGES:
        for path in (ROOT / page).rglob("*.md") if (ROOT / page).is_dir() else [ROOT / page]:
            yield str(path.relative_to(ROOT)), path.read_text()


def list_named() -> list[tuple[str, str, list[str]]]:
    """Return place, program and arguments of each command that is named."""
    return [
        (place, found[1], [re.sub(r"[,;:.]$", "", word) for word in found[2].split()])
        for place, text in list_texts()
        for pattern in (NAMED, TYPED)
        for found in pattern.finditer(text)
    ]


def find_in_toolkit(words: list[str]) -> set[str]:
    """Return the options of `edgekit WORDS`; takes the names of commands from the words."""
    command: click.Command = cli
    options = {"--help", "-h"}
    while True:
        if isinstance(command, LazyCommand):
            command = command.load()
        options |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        if not isinstance(command, click.Group) or not words or not re.fullmatch("[a-z][a-z-]*", words[0]):
            return options
        command = command.commands[words.pop(0)]


@functools.cache
def make_device_parser() -> argparse.ArgumentParser:
    return device_cli._make_parser(())


def find_on_device(words: list[str]) -> set[str]:
    """Return the options of `edgekit-device WORDS`; takes the names of commands from the words."""
    parser = make_device_parser()
    options = set(parser._option_string_actions)
    while True:
        groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        if not groups or not words or not re.fullmatch("[a-z][a-z-]*", words[0]):
            return options
        parser = groups[0].choices[words.pop(0)]
        options |= set(parser._option_string_actions)


def test_named_commands_exist() -> None:
    named, faults = list_named(), []
    for place, program, words in named:
        text = f"{place}: {program} {' '.join(words)}"
        try:
            options = (find_in_toolkit if program == "edgekit" else find_on_device)(words)
        except KeyError as missing:
            faults.append(f"{text}: no command {missing}")
            continue
        faults += [
            f"{text}: no option {each}"
            for each in words
            if each.startswith("--") and each.partition("=")[0] not in options
        ]
    assert len(named) > 400
    assert not faults, "\n".join(faults)
