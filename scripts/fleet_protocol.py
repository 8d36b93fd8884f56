"""Write docs/reference/fleet-protocol.json: the protocol of the fleet as AsyncAPI 3, from its dataclasses.

Usage: python scripts/fleet_protocol.py [--check]

The schema of each payload comes from the types, ranges and docstrings in `edgekit_runtime.agent.documents`; a
test holds the file against them, and others hold every message on the wire against the file.

Source: AsyncAPI specification 3.0.0; JSON Schema, draft 07.
"""

import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from edgekit_runtime.agent import documents
from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Kind
from edgekit_runtime.dataclass_json import Range

PATH = Path(__file__).parent.parent / "docs" / "reference" / "fleet-protocol.json"

# Kind -> dataclass, who sends it, whether the broker retains it, what it is for.
_MESSAGES: dict[Kind, tuple[type[Any], str, bool, str]] = {
    "hello": (documents.Hello, "device", True, "First message of a connection, and its last will."),
    "desired": (documents.Desired, "manager", True, "What the device shall run."),
    "reported": (documents.Reported, "device", True, "What is true on the device."),
    "event": (documents.Event, "device", False, "What a later report would hide."),
}


def make_document() -> dict[str, Any]:
    """Return the AsyncAPI document."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "edgekit fleet",
            "version": str(documents.PROTOCOL),
            "license": {"name": "Apache-2.0"},
            "description": (
                "MQTT 5 or 3.1.1 over TLS, QoS 1, one client certificate a device. Each message is a DSSE"
                f" envelope of at most {MAX_DOCUMENT_BYTES} bytes with one Ed25519 signature; the schemas"
                " below are those of its payload, and a receiver ignores fields that it does not"
                " know. A retained message is a cache: the truth is in the manager's store and in the"
                " device's journal."
            ),
        },
        "defaultContentType": "application/vnd.dsse.envelope.v1+json",
        "channels": {kind: _channel(kind) for kind in _MESSAGES},
        "operations": {kind: _operation(kind) for kind in _MESSAGES},
        "components": {
            "messages": {kind: _message(kind) for kind in _MESSAGES},
            "schemas": {"envelope": _ENVELOPE, **_schemas()},
        },
    }


_ENVELOPE = {
    "type": "object",
    "description": "DSSE 1.0; `payload` and `sig` in base64. The type of the payload names its kind.",
    "required": ["payload", "payloadType", "signatures"],
    "additionalProperties": False,
    "properties": {
        "payload": {"type": "string", "contentEncoding": "base64"},
        "payloadType": {"type": "string", "pattern": r"^application/vnd\.edgekit\.fleet\.[a-z]+\+json$"},
        "signatures": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "required": ["keyid", "sig"],
                "additionalProperties": False,
                "properties": {
                    "keyid": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                    "sig": {"type": "string", "contentEncoding": "base64"},
                },
            },
        },
    },
}


def _channel(kind: Kind) -> dict[str, Any]:
    return {
        "address": documents.topic("{device}", kind),
        "parameters": {"device": {"description": "Identifier: the common name of its certificate."}},
        "messages": {kind: {"$ref": f"#/components/messages/{kind}"}},
        "bindings": {"mqtt": {"bindingVersion": "0.2.0"}},
    }


def _operation(kind: Kind) -> dict[str, Any]:
    """Return the operation as the device sees it."""
    _, sender, retained, purpose = _MESSAGES[kind]
    return {
        "action": "send" if sender == "device" else "receive",
        "channel": {"$ref": f"#/channels/{kind}"},
        "summary": purpose,
        "bindings": {"mqtt": {"qos": 1, "retain": retained, "bindingVersion": "0.2.0"}},
    }


def _message(kind: Kind) -> dict[str, Any]:
    record, sender, _, purpose = _MESSAGES[kind]
    return {
        "summary": purpose,
        "description": f"Signed by the {sender}. Its envelope states the type of the payload.",
        "contentType": f"application/vnd.edgekit.fleet.{kind}+json",
        "payload": {"$ref": f"#/components/schemas/{record.__name__}"},
    }


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record, *_ in _MESSAGES.values():
        _add_schema(record, found)
    return found


def _add_schema(record: type[Any], found: dict[str, Any]) -> None:
    if record.__name__ in found:
        return
    found[record.__name__] = {}  # before its fields, in case one is of the same type
    hints = get_type_hints(record, include_extras=True)
    texts = _describe_fields(record)
    properties, required = {}, []
    for field in dataclasses.fields(record):
        schema = _schema(hints[field.name], found)
        if text := texts.get(field.name):
            schema = {**schema, "description": text} if "$ref" not in schema else schema
        properties[field.name] = schema
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    found[record.__name__] = {
        "type": "object",
        "description": (inspect.getdoc(record) or "").split("\n\n")[0].replace("\n", " "),
        "required": sorted(required),
        "additionalProperties": False,
        "properties": properties,
    }


def _schema(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    limits = {}
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
        if isinstance(allowed, Range):
            limits = {"minimum": allowed.least, "maximum": allowed.most}
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [each for each in get_args(hint) if each is not type(None)]
        return {"anyOf": [_schema(inner, found), {"type": "null"}]}
    if get_origin(hint) is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _schema(get_args(hint)[0], found)}
    if get_origin(hint) is Mapping:
        return {"type": "object", "additionalProperties": _schema(get_args(hint)[1], found)}
    if dataclasses.is_dataclass(hint):
        _add_schema(hint, found)
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[hint], **limits}


def _describe_fields(record: type[Any]) -> dict[str, str]:
    """Return field -> its description in the docstring; one line may describe several fields."""
    _, _, section = (inspect.getdoc(record) or "").partition("Attributes:\n")
    section = section.split("\n\n")[0]
    found = {}
    for entry in re.split(r"\n    (?! )", "\n" + section):
        names, colon, text = entry.partition(":")
        if colon:
            for name in names.split(","):
                found[name.strip()] = " ".join(text.split())
    return found


def main() -> int:
    """Write the document, or compare the file with it."""
    text = json.dumps(make_document(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text)
        return 0
    if PATH.read_text() == text:
        return 0
    print(f"{PATH} does not fit the dataclasses; run python scripts/fleet_protocol.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
