"""Selectors: which devices are meant, and what a malformed one is answered with."""

import pytest
from tests.toolkit.cases import cases

from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_runtime.errors import FleetError

DEVICE = {
    "name": "cam-7",
    "class": "jetson-orin-nano",
    "site": "lyon",
    "beta": "",
    "floor": "2",
    "town": "a b",
}


@cases(
    ("text", "is_meant"),
    [
        ("all", True),
        ("class=jetson and site=lyon", True),
        ("class=jetson-orin-nano", True),
        ("class=jets", False),
        ("class==rpi5", False),
        ("site!=lyon", False),
        ("owner!=me", True),
        ("owner=me", False),
        ("beta", True),
        ("not beta", False),
        ("gamma or site in (paris, lyon)", True),
        ("site not in (paris,lyon)", False),
        ("name=cam-*", True),
        ("name=cam-[0-6]", False),
        ("name='cam-?'", True),
        ('town="a b"', True),
        ("site=paris or class=jetson and floor=3", False),
        ("(site=paris or class=jetson) and floor=2", True),
        ("not (site=paris or floor=2)", False),
        ("not not site=lyon", True),
        ("site=nice or not class=rpi5 and beta", True),
    ],
)
def test_selector_means_the_right_devices(text: str, is_meant: bool) -> None:
    assert parse_selector(text).matches(DEVICE) is is_meant


@cases(
    ("text", "expected"),
    [
        ("", "the end"),
        ("site=", "expected a value"),
        ("site lyon", "expected 'and', 'or' or the end"),
        ("=lyon", "expected the name"),
        ("site in lyon", "expected '('"),
        ("site in (lyon", "expected ')'"),
        ("site not lyon", "expected 'in'"),
        ("(site=lyon", "expected ')'"),
        ("site=lyon)", "expected 'and', 'or' or the end at character 10"),
        ("and", "expected the name"),
        ('site="lyon', "expected a"),
        ("not " * 500, "at most 40"),
        ("(" * 500, "at most 40"),
        ("a" * 3000, "at most 2000"),
        ("class in (" + "a," * 100 + "a)", "at most 100 patterns"),
        (" or ".join(["x=*b"] * 101), "at most 100 patterns"),
        ("free_bytes=1*", "'free_bytes' changes with nearly every report"),
        ("site=lyon and not battery=low*", "'battery' changes with nearly every report"),
        ("clock!=x", "'clock' changes with nearly every report"),
        ("battery>5", "compare by '=', '!=' and 'in' alone"),
        ("site=lyon and a<=b", "at character 15, got 'a<=b'"),
        ("site=[^a]*", "expected sets such as"),
        ("site=[z-a]", "expected sets such as"),
        ("site=[[:alpha:]]", "expected sets such as"),
        ("boot in (a, b)", "'boot' changes with nearly every report"),
    ],
)
def test_malformed_selector_is_refused_with_the_place(text: str, expected: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse_selector(text)
    assert expected in str(caught.value)


def test_selector_names_what_it_asks_for() -> None:
    assert parse_selector("class=rpi5 and (site=lyon or not beta)").names == {"class", "site", "beta"}
