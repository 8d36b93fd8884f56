"""Checks messages of the fleet against docs/reference/fleet-protocol.json."""

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema

PROTOCOL = Path(__file__).parent.parent / "docs" / "reference" / "fleet-protocol.json"


def check_message(topic: str, envelope: bytes) -> dict[str, Any]:
    """Return the payload of a message, after the envelope and it fit the written protocol."""
    document = json.loads(PROTOCOL.read_text())
    kind = topic.rpartition("/")[2]
    assert topic.rpartition("/")[0].startswith("ek/v1/d/")
    message = document["components"]["messages"][kind]
    opened = json.loads(envelope)
    _validate(document, {"$ref": "#/components/schemas/envelope"}, opened)
    assert opened["payloadType"] == message["contentType"]
    payload = json.loads(base64.b64decode(opened["payload"]))
    _validate(document, message["payload"], payload)
    return payload


def _validate(document: dict[str, Any], schema: dict[str, Any], instance: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft7Validator(whole).validate(instance)
