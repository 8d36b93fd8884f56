"""Joined graphs of random models: whatever the machines fuse, every placement can run on the model itself."""

import random
from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

from edgekit_offload.profiling.model_profile import KernelTime, ModelProfile, digest_model
from edgekit_offload.profiling.planning_graph import PlanningGraph, join_profiles
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.measurement.machine_facts import MachineFacts

FACTS = MachineFacts(
    cpu="cpu",
    system="Linux",
    cores=1,
    quota=None,
    load=None,
    engine="onnxruntime",
    date="2026-01-01T00:00:00Z",
)
MOST_PLACEMENTS = 200
REPEATED = {"Constant", "Identity", "DequantizeLinear"}


def random_model(rng: random.Random) -> onnx.ModelProto:
    """Return a model of small nodes with branches, constants, views and unused nodes."""
    tensors, nodes = ["input"], []
    constants = ["weight"]
    for number in range(rng.randint(1, 14)):
        kind, name = rng.choice(["Relu", "Add", "Add", "Mul", "Identity", "Split", "Constant"]), f"t{number}"
        if kind == "Constant":
            value = helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [1.0])
            nodes.append(helper.make_node(kind, [], [name], name=name, value=value))
            constants.append(name)
            continue
        outputs = [f"{name}a", f"{name}b"] if kind == "Split" else [name]
        reads = [rng.choice(tensors[-4:])]
        if kind in ("Add", "Mul"):
            reads.append(rng.choice([*tensors[-4:], rng.choice(constants)]))
        nodes.append(helper.make_node(kind, reads, outputs, name=name))
        tensors += outputs
    made = [tensor for tensor in tensors[1:] if tensor]
    if not made:
        nodes.append(helper.make_node("Relu", ["input"], ["only"], name="only"))
        made = ["only"]
    outputs = dict.fromkeys([made[-1], *([rng.choice(made)] if rng.random() < 0.3 else [])])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    given = helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, [4])
    weight = helper.make_tensor("weight", onnx.TensorProto.FLOAT, [1], [2.0])
    return helper.make_model(helper.make_graph(nodes, "g", [given], values, [weight]))


def random_profile(rng: random.Random, model: onnx.ModelProto) -> ModelProfile:
    """Return a profile of an engine that lost some tensors by fusion and renamed others."""
    graph = model.graph
    outputs = {one.name for one in graph.output}
    share = rng.choice([0.0, 0.2, 0.5])
    kernels, names = [], {}
    for node in graph.node:
        if node.op_type == "Constant":
            continue
        for tensor in node.output:
            if tensor not in outputs and rng.random() < share:
                names[tensor] = f"{tensor}_fused"
        reads = tuple(names.get(tensor, tensor) for tensor in node.input if tensor != "weight")
        writes = tuple(names.get(tensor, tensor) for tensor in node.output)
        kernels.append(KernelTime(node.name, node.op_type, reads, writes, rng.random()))
    tensors = {"input": 16} | {tensor: 16 for node in graph.node for tensor in node.output}
    return ModelProfile(
        model="random",
        model_sha256=digest_model(model.SerializeToString()),
        measured_on="local",
        machine=FACTS,
        label="measured",
        whole_s=sum(kernel.seconds for kernel in kernels),
        whole_spread=0.0,
        scale=1.0,
        inputs=("input",),
        outputs=tuple(outputs),
        tensors=tensors,
        kernels=tuple(kernels),
    )


def check_placement(model: onnx.ModelProto, joined: PlanningGraph, placement: tuple[int, ...]) -> None:
    """Check that both sides have what their nodes read, and that only tensors of the graph are sent."""
    graph, nodes = joined.graph, model.graph.node
    sides: list[set[int]] = [set(), set()]
    for place, tier in enumerate(placement):
        sides[tier].update(joined.nodes[place])
    sent = {
        tensor
        for tensor in graph.tensors
        if any(placement[place] for place in graph.consumers[tensor])
        and not (tensor in graph.producer and placement[graph.producer[tensor]])
    }
    known = [{"input", "weight"}, {"weight", *sent}]
    for side, present in zip(sides, known, strict=True):
        for number in sorted(side):
            node = nodes[number]
            lacking = set(node.input) - present
            assert not lacking, f"node {node.name} lacks {lacking}"
            present.update(node.output)
    for tensor in graph.outputs:
        assert tensor in known[0] | known[1]


@pytest.mark.parametrize("first_seed", range(0, 300, 30))
def test_every_placement_of_a_joined_graph_runs_on_the_model(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 30):
        check_placements(seed)


def check_placements(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    profiles = [random_profile(rng, model), random_profile(rng, model)]
    joined = join_profiles(model.SerializeToString(), profiles)
    counts = Counter(number for group in joined.nodes for number in group)
    for number, node in enumerate(model.graph.node):
        assert counts[number] == 1 or node.op_type in REPEATED, node.name
    for machine, profile in enumerate(profiles):
        assert joined.seconds[:, machine].sum() == pytest.approx(profile.whole_s)
    placements = joined.graph.placements(2, 1_000_000)
    assert placements is not None
    for placement in placements[:: len(placements) // MOST_PLACEMENTS + 1].tolist():
        check_placement(model, joined, tuple(placement))
    assert set(joined.tensor_bytes) == set(joined.graph.tensors)
    assert (joined.weight_bytes[joined.weight_readers.any(axis=0)].sum() > 0) == any(
        "weight" in node.input or node.op_type == "Constant"
        for number, node in enumerate(model.graph.node)
        if number in counts
    )


def profile_of(model: onnx.ModelProto, tensors: set[str]) -> ModelProfile:
    """Return a profile of an engine in which only `tensors` exist by their names."""
    made = random_profile(random.Random(0), model)
    kernels = []
    for node in model.graph.node:
        writes = tuple(tensor if tensor in tensors else f"{tensor}_x" for tensor in node.output)
        kernels.append(KernelTime(node.name, node.op_type, tuple(node.input), writes, 1.0))
    return ModelProfile(
        **{
            field: getattr(made, field)
            for field in ("model", "model_sha256", "measured_on", "machine", "label", "whole_spread")
        },
        whole_s=float(len(kernels)),
        scale=1.0,
        inputs=("x",),
        outputs=("y",),
        tensors={"x": 4} | {tensor: 4 for node in model.graph.node for tensor in node.output},
        kernels=tuple(kernels),
    )


def test_skip_around_a_lost_tensor_becomes_one_kernel() -> None:
    # b is lost, so its writer and its reader are one kernel, which c would leave and enter again.
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y)'
        " { a = Relu(x) b, d = Split(a) c = Neg(d) e = Add(b, c) y = Neg(e) }"
    )
    joined = join_profiles(model.SerializeToString(), [profile_of(model, {"a", "c", "d", "e", "y"})])
    assert joined.nodes == ((0,), (1, 2, 3), (4,))
    assert np.allclose(joined.seconds[:, 0], [1, 3, 1])


def test_skip_over_int8_is_cut_at_the_int8_tensor() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y)'
        " <float s = {0.5}, int8 z = {0}>"
        " { q = QuantizeLinear(x, s, z) f = DequantizeLinear(q, s, z) a = Relu(f) b = Sigmoid(a)"
        " y = Add(b, f) }"
    )
    joined = join_profiles(model.SerializeToString(), [profile_of(model, {"q", "a", "b", "y"})])
    assert joined.graph.tensors == ("x", "q", "a", "b", "y")
    assert joined.graph.consumers["q"] == (1, 3)
    assert joined.nodes == ((0,), (1, 2), (3,), (1, 4))


def test_weight_that_two_kernels_read_is_known_to_both() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y)'
        " <float[2] w = {1, 2}, float[2] unused = {1, 2}>"
        " { c = Constant <value = float[2] {3, 4}> () a = Mul(x, w) b = Add(a, c) d = Mul(b, w)"
        " y = Add(d, c) }"
    )
    joined = join_profiles(model.SerializeToString(), [profile_of(model, {"a", "b", "d", "y"})])
    assert joined.weight_bytes.tolist() == [8, 8, 8]
    assert joined.weight_readers.T.tolist() == [
        [True, False, True, False],
        [False, False, False, False],
        [False, True, False, True],
    ]


def test_model_with_an_obstacle_has_no_graph() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Neg(x) }'
    )
    profile = profile_of(model, {"y"})
    blocked = ModelProfile(**{name: getattr(profile, name) for name in profile.__slots__} | {"obstacle": "a"})
    with pytest.raises(CutError, match="whole-model candidates only"):
        join_profiles(model.SerializeToString(), [blocked])
