"""Finds operators that ONNX defines as functions of simpler operators, and inlines them.

Examples are `Attention`, `GroupNormalization` and `Gelu`. An engine has kernels for some of these operators.
The others, and cases that a kernel refuses, can be replaced by their definitions.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import onnx
from onnx import helper, inliner

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.index import DEFAULT_DOMAINS, STANDARD_DOMAINS, copy_model, set_items
from edgekit_toolkit.onnx_graph.traversal import graphs, nodes

_DOMAIN: Final = "edgekit.functions"
OpSchema = Any  # onnx.defs.OpSchema, whose type stubs lack what it says about functions


def function_operators(model: onnx.ModelProto) -> dict[str, OpSchema]:
    """Return the schemas of the model's operators that ONNX defines as functions, by operator name."""
    return {
        schema.name: schema
        for schema in _schemas(model)
        if schema.has_function or schema.has_context_dependent_function
    }


def opaque_functions(model: onnx.ModelProto) -> set[str]:
    """Return the names of the `function_operators` for which ONNX cannot infer types and shapes."""
    functions = function_operators(model).items()
    return {name for name, schema in functions if not schema.has_type_and_shape_inference_function}


def write_out_opaque(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with inlined `opaque_functions`, or `model` itself if it has none."""
    return inline_functions(model, opaque_functions(model)) or model


def foreign_functions(model: onnx.ModelProto) -> set[str]:
    """Return the names of the operators that ONNX defines as functions and that no engine supports.

    These are deprecated operators, and operators of domains such as `ai.onnx.preview`.
    """
    return {
        name
        for name, schema in function_operators(model).items()
        if schema.domain not in STANDARD_DOMAINS or schema.deprecated
    }


def named_functions(model: onnx.ModelProto, reason: str) -> set[str]:
    """Return the names of the `function_operators` that the error message `reason` mentions."""
    return {name for name in function_operators(model) if re.search(rf"\b{name}\b", reason)}


def inline_functions(model: onnx.ModelProto, operators: Collection[str]) -> onnx.ModelProto | None:
    """Return a copy with these operators inlined, or None if the model has none of them.

    The names of the model's tensors are kept.

    Raises:
        ModelError: The definition of an operator does not fit its node, or type inference fails.
    """
    schemas = {name: schema for name, schema in function_operators(model).items() if name in operators}
    if not schemas:
        return None
    result = copy_model(model)
    versions = {_domain(item.domain): int(item.version) for item in model.opset_import}
    try:
        types = _types(onnx.shape_inference.infer_shapes(model))
    except Exception as error:  # InferenceError, RuntimeError and ValueError, by the cause
        raise ModelError(f"operators cannot be written out, as no types can be inferred: {error}") from error
    for graph in graphs(result.graph):
        for node in graph.node:
            schema = schemas.get(node.op_type)
            if schema is not None and _domain(node.domain) == schema.domain:
                function = _definition(schema, node, versions[schema.domain], types)
                function.domain, function.name = _DOMAIN, f"{node.op_type}_{len(result.functions)}"
                set_items(function.opset_import, model.opset_import)
                node.domain, node.op_type = function.domain, function.name
                result.functions.append(function)
    result.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    result = inliner.inline_local_functions(result)
    set_items(result.opset_import, (item for item in result.opset_import if item.domain != _DOMAIN))
    return result


def _definition(
    schema: OpSchema, node: onnx.NodeProto, version: int, types: Mapping[str, onnx.TypeProto]
) -> onnx.FunctionProto:
    """Return the function of one node; the node's attributes that it leaves to their defaults are set."""
    content = node.SerializeToString()
    stated = {item.name for item in node.attribute}
    defaults = [item.default_value for name, item in sorted(schema.attributes.items()) if name not in stated]
    node.attribute.extend(item for item in defaults if item.name)
    try:
        if schema.has_function:
            content = schema.get_function_with_opset_version(version)
        else:
            inputs = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
            stated_in = [item for item in schema.context_dependent_function_opset_versions if item <= version]
            written_for = max(stated_in, default=version)  # later sets have no definition of their own
            content = schema.get_context_dependent_function_with_opset_version(written_for, content, inputs)
    except Exception as error:  # ONNX's C++ code has no common base of exceptions
        raise ModelError(f"operator '{node.op_type}' cannot be written out: {error}") from error
    function = onnx.FunctionProto()
    function.ParseFromString(content)
    if not function.node:
        raise ModelError(f"operator '{node.op_type}' has no definition in opset {version}")
    return function


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    types = {}
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types[value.name] = value.type
        for tensor in graph.initializer:
            types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def _schemas(model: onnx.ModelProto) -> Iterator[OpSchema]:
    versions = {_domain(item.domain): int(item.version) for item in model.opset_import}
    pairs = {(_domain(node.domain), node.op_type) for node in nodes(model)}
    for domain, name in pairs:
        if domain in versions and onnx.defs.has(name, domain):
            try:
                yield onnx.defs.get_schema(name, versions[domain], domain)
            except onnx.defs.SchemaError:  # the operator is newer than the operator set
                continue


def _domain(name: str) -> str:
    return "" if name in DEFAULT_DOMAINS else name
