"""Options of `edgekit-device` that take a number: none takes NaN, infinity or what overflows later."""

import argparse
import importlib
import math
import pkgutil

import pytest

from edgekit_runtime import commands

HOSTILE = ("nan", "-nan", "inf", "-inf", "1e999", "1e308", "-0", "")


def list_options(parser, path=""):
    """Yield path, name and type of each option of a parser and of those below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from list_options(below, f"{path} {name}")
        elif callable(action.type):
            yield f"{path} {action.dest}", action.type


def make_parser():
    parser = argparse.ArgumentParser()
    below = parser.add_subparsers()
    for module in pkgutil.iter_modules(commands.__path__):
        command = importlib.import_module(f"{commands.__name__}.{module.name}")
        if hasattr(command, "add_parser"):
            command.add_parser(below)
    return parser


def is_number(convert):
    try:
        return isinstance(convert("5"), (int, float))
    except (argparse.ArgumentTypeError, ValueError, TypeError):
        return False


NUMBERS = [pytest.param(kind, id=name) for name, kind in list_options(make_parser()) if is_number(kind)]


def test_there_are_options_for_numbers():
    assert len(NUMBERS) > 5


@pytest.mark.parametrize("convert", NUMBERS)
def test_option_for_a_number_takes_finite_ones_alone(convert):
    for text in HOSTILE:
        try:
            value = convert(text)
        except (argparse.ArgumentTypeError, ValueError):
            continue
        assert math.isfinite(value), text
        assert abs(value) <= 1e12, text
