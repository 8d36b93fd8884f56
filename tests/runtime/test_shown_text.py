"""Foreign text in logs and on terminals: it is one line, and acts on nothing."""

import logging

import pytest

from edgekit_runtime.system.shown_text import LineFormatter

HOSTILE = "d1\x1b]0;t\x07\r\nroot: login ok\u202e\u2028\x85\t\x9b31m\ud800"


def format_record(error=None, **values):
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "refused: %s", (HOSTILE,), error, **values)
    return LineFormatter("edgekit: %(message)s").format(record)


def test_text_of_a_stranger_stays_on_its_line_of_the_log():
    line = format_record()
    assert line.startswith("edgekit: refused: d1\ufffd]0;t")
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    line.encode()


def test_text_of_a_stranger_in_a_traceback_does_not_act():
    try:
        int(HOSTILE)
    except ValueError as error:
        text = format_record((ValueError, ValueError(HOSTILE), error.__traceback__))
    assert "Traceback" in text
    assert all(char.isprintable() or char in "\n\t" for char in text)


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\x7f", "\x9b", "\u2066", "\u202a", "\u2029", "\ufeff"])
def test_character_that_acts_is_replaced(char):
    record = logging.LogRecord("a", logging.WARNING, "f", 1, char, (), None)
    assert LineFormatter().format(record) == "\ufffd"
