"""Write docs/reference/fleet-protocol.json, the fleet's messages as AsyncAPI 3.

Usage: python scripts/fleet_protocol.py [--check]

The schema of each payload comes from the types, ranges and docstrings in `edgekit_runtime.agent.documents`; a
test holds the file against them, and others hold every message on the wire against the file.

Source: AsyncAPI specification 3.0.0; JSON Schema, draft 07.
"""

import json
import sys
from pathlib import Path
from typing import Any

from edgekit_fleet.api.json_schema import add_schema
from edgekit_runtime.agent import documents
from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Kind

PATH = Path(__file__).parent.parent / "docs" / "reference" / "fleet-protocol.json"

# Kind -> dataclass, who sends it, whether the broker retains it, what it is for.
_MESSAGES: dict[Kind, tuple[type[Any], str, bool, str]] = {
    "hello": (documents.Hello, "device", True, "First message of a connection, and its last will."),
    "desired": (documents.Desired, "manager", True, "What the device shall run."),
    "reported": (documents.Reported, "device", True, "What is true on the device."),
    "event": (documents.Event, "device", False, "What a later report would hide."),
    "logs": (documents.Logs, "device", False, "The last lines of the logs, once for a request."),
}


def make_document() -> dict[str, Any]:
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
    schemas: dict[str, Any] = {}
    for record, *_ in _MESSAGES.values():
        add_schema(record, schemas)
    return schemas


def main() -> int:
    """Write the document, or compare the file with it."""
    text = json.dumps(make_document(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text)
    elif PATH.read_text() != text:
        print(f"{PATH} does not fit the dataclasses; run scripts/fleet_protocol.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
