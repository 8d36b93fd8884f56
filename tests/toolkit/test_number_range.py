"""Options that take a number, of every command: none takes NaN or infinity."""

import importlib
import pkgutil

import click

import edgekit_cli
from edgekit_cli.cli import main
from edgekit_cli.number_range import NumberRange


def list_options(command, path):
    """Yield the words and each option of a command and of those below it."""
    for name, below in getattr(command, "commands", {}).items():
        yield from list_options(below, f"{path} {name}")
    for option in command.params:
        yield path, option


def find_numbers():
    """Return the options that take a number, of every command; imports all of them."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(edgekit_cli.__path__, f"{edgekit_cli.__name__}.")
        if not module.name.endswith(".__main__")  # it takes over SIGINT
    ]
    return {
        f"{path} {option.name}": option
        for module in modules
        if isinstance(getattr(module, "command", None), click.Command)
        for path, option in list_options(module.command, module.__name__.removeprefix("edgekit_cli."))
        if option.type.name.startswith("float")
    }


def takes(option, text):
    try:
        option.type.convert(text, option, None)
    except click.BadParameter:
        return False
    return True


def test_option_for_a_number_takes_finite_ones_alone():
    numbers = find_numbers()
    assert numbers
    assert [name for name, option in numbers.items() if not isinstance(option.type, NumberRange)] == []
    texts = ("nan", "-nan", "inf", "-inf", "1e999", "")
    assert [(name, text) for name, option in numbers.items() for text in texts if takes(option, text)] == []


def test_number_that_is_none_is_refused_by_the_name_of_its_option(capsys):
    assert main(["fleet", "enroll", "--name", "d1", "--hours", "nan"]) == 2
    assert "Invalid value for '--hours': 'nan' is no finite number" in capsys.readouterr().err
