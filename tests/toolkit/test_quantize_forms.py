"""Forms as data: round trips, refusals, and builds that give the same bytes everywhere."""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.toolkit.cases import cases
from tests.toolkit.small_models import (
    assert_valid,
    model_of,
    node,
    operators,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, build
from edgekit_toolkit.quantize.onnx.equalize import find_factors
from edgekit_toolkit.quantize.plan import Plan, kernel_names
from edgekit_toolkit.quantize.ranges import collect
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, SCHEMES, Scheme


def network() -> onnx.ModelProto:
    """A network that every form changes."""
    rng = np.random.default_rng(19)
    weights = {
        "w": random_weight(rng, 16, 3, 3, 3),
        "b": random_weight(rng, 16),
        "v": random_weight(rng, 64, 16, 3, 3),
        "shape": np.array([0, -1], np.int64),
        "d": random_weight(rng, 1024, 10),
        "e": random_weight(rng, 10),
    }
    nodes = [
        node("Conv", ["x", "w", "b"], ["stem"]),
        node("Relu", ["stem"], ["r"]),
        node("Conv", ["r", "v"], ["body"]),
        node("Relu", ["body"], ["s"]),
        node("Reshape", ["s", "shape"], ["f"]),
        node("MatMul", ["f", "d"], ["m"]),
        node("Add", ["m", "e"], ["y"]),
    ]
    return model_of(nodes, weights, {"x": (1, 3, 8, 8)})


def static_form(scheme: Scheme = ASYMMETRIC) -> Form:
    model = network()
    feeds = random_feeds(model, np.random.default_rng(20))
    names = sorted({name for item in model.graph.node for name in item.output} | {"x"})
    ranges = collect(model, names, lambda: iter([feeds]), threads=1)
    kernels = frozenset(kernel_names(model, scheme, elementwise=True))
    plan = Plan(scheme, kernels, {name: item.whole() for name, item in ranges.items()})
    return Form(forms.STATIC_INT8, plan, find_factors(model, ranges))


NAMES = [
    *(kind for kind in forms.KINDS if kind != forms.STATIC_INT8),
    *(f"static {name}" for name in SCHEMES),
]


@functools.cache  # and not while tests are collected
def all_forms() -> dict[str, Form]:
    schemes = {f"static {name}": scheme for name, scheme in SCHEMES.items()}
    return {name: static_form(schemes[name]) if name in schemes else Form(name) for name in NAMES}


def bytes_of(form: Form) -> bytes:
    made = build(network(), form)
    assert made is not None
    return made.SerializeToString(deterministic=True)


@cases("name", NAMES)
def test_form_builds_the_same_model_after_a_trip_through_json(name: str) -> None:
    form = all_forms()[name]
    written = encode_json(form.to_json())
    again = Form.from_json(json.loads(written))
    assert encode_json(again.to_json()) == written
    assert bytes_of(again) == bytes_of(form)


@cases("name", NAMES)
def test_form_computes_nearly_the_same_with_the_same_interface(name: str) -> None:
    before, made = network(), build(network(), all_forms()[name])
    assert made is not None
    assert_valid(made)
    feeds = random_feeds(before, np.random.default_rng(20))
    lowest_db = {forms.FLOAT32: 200, forms.FLOAT16_WEIGHTS: 60, forms.INT4_WEIGHTS: 15}.get(name, 25)
    assert snr_db(run(before, feeds)["y"], run(made, feeds)["y"]) > lowest_db


def test_forms_are_smaller_than_float() -> None:
    sizes = {name: len(bytes_of(form)) for name, form in all_forms().items()}
    assert sizes["float16-weights"] < 0.55 * sizes["float32"]
    assert sizes["int8-weights"] < 0.35 * sizes["float32"]
    assert sizes["static asymmetric"] < 0.35 * sizes["float32"]


def test_static_form_has_equalized_layers_and_half_precision_elsewhere() -> None:
    form = static_form()
    assert form.plan is not None
    assert set(form.factors) == {"stem"}
    fewer = Form(form.kind, Plan(ASYMMETRIC, frozenset({"stem"}), form.plan.ranges), form.factors)
    made = build(network(), fewer)
    assert made is not None
    assert operators(made).count("Cast") == 2  # weights of the layers that stay in float


@pytest.mark.parametrize(
    "kind", [forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.INT4_WEIGHTS, forms.DYNAMIC_INT8]
)
def test_form_that_changes_nothing_has_no_model(kind: str) -> None:
    model = model_of([node("Relu", ["x"], ["y"])], {}, {"x": (1, 4)})
    assert build(model, Form(kind)) is None


BUILD = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from tests.toolkit.test_quantize_forms import all_forms, bytes_of
for name, form in all_forms().items():
    print(name, hashlib.sha256(bytes_of(form)).hexdigest(), sep="=")
"""


def test_every_process_builds_the_same_bytes() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BUILD, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    there = dict(line.split("=") for line in done.stdout.splitlines())
    here = {name: hashlib.sha256(bytes_of(form)).hexdigest() for name, form in all_forms().items()}
    assert there == here


# Refusals.


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(encode_json(static_form().to_json()))
    change(value)
    return value


@cases("field", ["kind", "scheme", "per_channel", "kernels", "ranges", "factors"])
def test_form_without_a_field_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(RecipeError, match=field):
        Form.from_json(broken(lambda value: value.pop(field)))


WRONG: list[tuple[str, Any]] = [
    ("kind", "int2"),
    ("kind", None),
    ("kind", ["float32"]),
    ("scheme", "diagonal"),
    ("scheme", ["symmetric"]),
    ("scheme", None),
    ("per_channel", "no"),
    ("per_channel", 1),
    ("per_channel", None),
    ("kernels", "stem"),
    ("kernels", [1]),
    ("kernels", {"stem": 1}),
    ("kernels", None),
    ("ranges", []),
    ("ranges", {"x": 1}),
    ("ranges", {"x": "12"}),
    ("ranges", {"x": [1]}),
    ("ranges", {"x": [1, 2, 3]}),
    ("ranges", {"x": ["1", "2"]}),
    ("ranges", {"x": [2, 1]}),
    ("ranges", {"x": [0, None]}),
    ("ranges", {"x": [0, math.inf]}),
    ("ranges", {"x": [math.nan, 1]}),
    ("ranges", {"x": [0, 10**400]}),
    ("factors", []),
    ("factors", {"stem": 3}),
    ("factors", {"stem": [1.0]}),
    ("factors", {"stem": "!!!!"}),
    ("factors", {"stem": "AAA"}),
    ("factors", {"stem": "ä"}),
    ("factors", {"stem": "AAAAAA=="}),  # 0.0
    ("factors", {"stem": "AACAvw=="}),  # -1.0
    ("factors", {"stem": "AADAfw=="}),  # NaN
    ("factors", {"stem": "AACAfw=="}),  # infinity
]


@cases(("field", "value"), WRONG, ids=[f"{field} {value}"[:40] for field, value in WRONG])
def test_form_with_a_wrong_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=r"^recipe: form"):
        Form.from_json(broken(lambda form: form.update({field: value})))


@pytest.mark.parametrize("value", [None, [], "static-int8", 3])
def test_form_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(RecipeError, match="expected an object"):
        Form.from_json(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["scheme", "per_channel", "kernels", "ranges", "factors"]), JSON)
def test_any_json_in_a_field_is_read_or_refused(field: str, value: Any) -> None:
    whole: dict[str, Any] = {
        "kind": "static-int8",
        "scheme": "symmetric",
        "per_channel": True,
        "kernels": ["stem"],
        "ranges": {"x": [-1, 1]},
        "factors": {},
    }
    try:
        form = Form.from_json({**whole, field: value})
    except RecipeError:
        return
    assert form.kind == forms.STATIC_INT8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value["kernels"].append("stranger"), "stranger"),
        (lambda value: value["ranges"].pop("x"), "x"),
        (lambda value: value["factors"].update(stranger="AACAPw=="), "stranger"),
        (lambda value: value["factors"].update(stem="AACAPw=="), "cannot be equalized by 1 factors"),
    ],
    ids=["kernel", "range", "tensor of factors", "number of factors"],
)
def test_form_of_another_model_is_refused(change: Callable[[dict[str, Any]], object], said: str) -> None:
    form = Form.from_json(broken(change))
    with pytest.raises(RecipeError, match=f"the form does not fit the model: .*{said}"):
        build(network(), form)


@pytest.mark.parametrize("kind", [forms.STATIC_INT8, "int2"])
def test_form_that_lacks_its_plan_or_is_unknown_cannot_be_made(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        Form(kind)
