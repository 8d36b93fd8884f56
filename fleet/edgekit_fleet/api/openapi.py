"""Builds the OpenAPI document of the HTTP interface from the table of endpoints.

Source: OpenAPI Specification 3.1.1.
"""

import dataclasses
import re
from typing import Any, Final, get_type_hints

from edgekit_fleet.api import problems
from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint
from edgekit_fleet.api.endpoints.table import ENDPOINTS, PREFIX
from edgekit_fleet.api.json_schema import Schemas, add_schema, schema_of
from edgekit_fleet.api.repeats import MAX_KEY_CHARS
from edgekit_runtime.dataclass_json import describe_fields, range_of_unit, to_plain

VERSION: Final = "1"
_PROBLEM: Final = {
    "type": "object",
    "description": "RFC 9457: why a request was refused.",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}
_NO_NUL: Final = "^[^\\u0000]*$"
_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A request with the same key and body is carried out once; both get the same answer.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_KEY_CHARS,
        "pattern": "^[!-~]([ -~]*[!-~])?$",
    },
}


def make_document() -> dict[str, Any]:
    schemas: Schemas = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "edgekit fleet",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Releases, rollouts and devices of a fleet, for programs such as a CI job.",
        },
        "servers": [{"url": PREFIX}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "`edgekit fleet token add`; each operation names the scope that it needs.",
                }
            },
        },
    }


def _operation(endpoint: AnyEndpoint, schemas: Schemas) -> dict[str, Any]:
    in_path = re.findall(r"\{(\w+)\}", endpoint.path)
    body = _list_body_fields(endpoint, in_path)
    parameters = [_parameter(endpoint, name, "path", schemas) for name in in_path]
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "description": f"Needs the scope `{endpoint.scope}`.",
    }
    if endpoint.method == "POST":
        parameters.append(_KEY)
        if body:
            operation["requestBody"] = _json_body(endpoint, body, schemas)
    elif endpoint.method == "PUT":
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    else:
        parameters += [_parameter(endpoint, name, "query", schemas) for name in body]
    if parameters:
        operation["parameters"] = parameters
    answer = add_schema(endpoint.answer, schemas)
    problem = {"$ref": "#/components/schemas/Problem"}
    operation["responses"] = {
        str(endpoint.status): {
            "description": "Done.",
            "content": {"application/json": {"schema": answer}},
        },
        "default": {
            "description": "Refused, or failed.",
            "content": {problems.MEDIA_TYPE: {"schema": problem}},
        },
    }
    return operation


def _list_body_fields(endpoint: AnyEndpoint, in_path: list[str]) -> list[str]:
    return [field.name for field in dataclasses.fields(endpoint.request) if field.name not in in_path]


def _parameter(endpoint: AnyEndpoint, name: str, location: str, schemas: Schemas) -> dict[str, Any]:
    hints = get_type_hints(endpoint.request, include_extras=True)
    schema = _state_limits(schema_of(hints[name], schemas), name)
    field = next(candidate for candidate in dataclasses.fields(endpoint.request) if candidate.name == name)
    has_default = field.default is not dataclasses.MISSING
    if has_default:
        schema = {**schema, "default": to_plain(field.default)}
    if location == "path":
        schema = {**schema, "minLength": 1}
    return {
        "name": name,
        "in": location,
        "required": not has_default,
        "description": describe_fields(endpoint.request).get(name, ""),
        "schema": schema,
    }


def _json_body(endpoint: AnyEndpoint, names: list[str], schemas: Schemas) -> dict[str, Any]:
    own: Schemas = {}
    add_schema(endpoint.request, own)
    own = {kind: _state_limits(schema, "") for kind, schema in own.items()}
    schema = own.pop(endpoint.request.__name__)
    schemas.update(own)
    schema["properties"] = {name: schema["properties"][name] for name in names}
    schema["required"] = [name for name in schema["required"] if name in names]
    schemas[endpoint.request.__name__] = schema
    reference = {"$ref": f"#/components/schemas/{endpoint.request.__name__}"}
    return {
        "required": bool(schema["required"]),
        "content": {"application/json": {"schema": reference}},
    }


def _state_limits(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a part of a request, with the limits that `from_plain` checks by itself."""
    kind = schema.get("type")
    if "anyOf" in schema:
        return {**schema, "anyOf": [_state_limits(member, name) for member in schema["anyOf"]]}
    if kind == "string" and "enum" not in schema:
        return {**schema, "pattern": _NO_NUL}
    if kind in ("integer", "number") and "minimum" not in schema:
        allowed = range_of_unit(name)
        return {**schema, "minimum": allowed.least, "maximum": allowed.most}
    if kind == "array":
        return {**schema, "items": _state_limits(schema["items"], name)}
    if "properties" in schema:
        properties = {field: _state_limits(member, field) for field, member in schema["properties"].items()}
        return {**schema, "properties": properties}
    if kind == "object":
        values = _state_limits(schema["additionalProperties"], name)
        return {**schema, "additionalProperties": values, "propertyNames": {"pattern": _NO_NUL}}
    return schema
