"""Builds the JSON Schema of dataclasses from their types, ranges and docstrings."""

import dataclasses
import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from edgekit_runtime.dataclass_json import Range, describe_fields

Schemas = dict[str, dict[str, Any]]


def add_schema(record: type[Any], schemas: Schemas) -> dict[str, Any]:
    """Return a reference to the schema of a dataclass, and add the schema to `schemas`.

    If a field contains another dataclass, the schema of that dataclass is added too.
    """
    reference = {"$ref": f"#/components/schemas/{record.__name__}"}
    if record.__name__ in schemas:
        return reference
    schemas[record.__name__] = {}  # before its fields, in case one is of the same type
    hints = get_type_hints(record, include_extras=True)
    texts = describe_fields(record)
    properties, required = {}, []
    for field in dataclasses.fields(record):
        schema = schema_of(hints[field.name], schemas)
        if text := texts.get(field.name):
            schema = {**schema, "description": text} if "$ref" not in schema else schema
        properties[field.name] = schema
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    schemas[record.__name__] = {
        "type": "object",
        "description": (inspect.getdoc(record) or "").split("\n\n")[0].replace("\n", " "),
        "required": sorted(required),
        "additionalProperties": False,
        "properties": properties,
    }
    return reference


def schema_of(hint: Any, schemas: Schemas) -> dict[str, Any]:
    """Return the JSON Schema of a type. If it contains dataclasses, their schemas are added to `schemas`."""
    limits = {}
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
        if isinstance(allowed, Range):
            limits = {"minimum": allowed.least, "maximum": allowed.most}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (kind,) = [member for member in inner if member is not type(None)]
        return {"anyOf": [{**schema_of(kind, schemas), **limits}, {"type": "null"}]}
    if origin is Literal:
        return {"type": "string", "enum": list(inner)}
    if origin is tuple and inner[-1] is not Ellipsis:
        size = len(inner)
        kinds = [schema_of(member, schemas) for member in dict.fromkeys(inner)]
        items = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}  # few programs know `prefixItems`
        return {"type": "array", "items": items, "minItems": size, "maxItems": size}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0], schemas)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(inner[1], schemas)}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return add_schema(hint, schemas)
    if hint is Any:
        return {}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[hint], **limits}
