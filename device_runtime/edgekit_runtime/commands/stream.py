"""`edgekit-device stream`: runs a model on the frames of a camera, and prints answers as lines of JSON."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.client.control import read_stream
from edgekit_runtime.commands.command import Outcome, count, positive, report
from edgekit_runtime.dataclass_json import from_plain, list_settings
from edgekit_runtime.errors import TransportError
from edgekit_runtime.protocol.streams import StreamOptions, hide_password
from edgekit_runtime.system.paths import find_running_service

_NUMBERS: Final[Mapping[type, Callable[[str], float]]] = {int: count, float: positive}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "stream",
        help="let a model answer the frames of a camera, a video or a microphone",
        description="Run a stream in the running service until the source or this command ends, and print"
        " the answers as lines of JSON. Use [streams.NAME] in the service's configuration for a stream that"
        " always runs.",
    )
    for setting in list_settings(StreamOptions):
        if setting.kind is bool:
            parsing: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            parsing = {
                "type": _NUMBERS.get(setting.kind, str),
                "action": "append" if setting.is_list else "store",
            }
            parsing["metavar"] = {int: "N", float: "X"}.get(setting.kind)
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            required=setting.is_needed,
            help=setting.help,
            **parsing,
        )
    parser.add_argument("--name", help="name of the stream (default: client-1 and so on)")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="socket of the service (default: the running one)"
    )
    parser.add_argument("--json", action="store_true", help="print errors as JSON, too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Run the stream and print its answers. Return the number of answers in total and for each sink."""
    socket_path: Path | None = arguments.socket or find_running_service()
    if socket_path is None:
        raise TransportError("no service runs here; start it with: edgekit-device serve")
    stated = {setting.name: getattr(arguments, setting.name) for setting in list_settings(StreamOptions)}
    stated = {name: value for name, value in stated.items() if value is not None}
    prints = "stdout" in stated.get("sinks", ["stdout"])
    sinks = [_resolve(sink) for sink in stated.get("sinks", []) if sink != "stdout"]
    stated |= {"source": _resolve(arguments.source), "sinks": sinks}
    order = from_plain(StreamOptions, stated, "stream").to_json()
    if arguments.name is not None:
        order["name"] = arguments.name
    begin_s, answers, summary = time.monotonic(), 0, dict[str, Any]()
    state: dict[str, Any] = {}
    for line in read_stream(socket_path, order):
        document: dict[str, Any] = json.loads(line)
        if "sinks" in document:
            summary["sinks"] = document["sinks"]
        elif "frame" not in document:
            state = document
            error = f": {document['error']}" if "error" in document else ""
            report(f"{document['stream']}: {document['state']}{error}")
        else:
            answers += 1
            if prints and not _print(line):
                break
    if state.get("state") == "failed":
        raise TransportError(f"{hide_password(arguments.source)}: {state.get('error', 'failed')}")
    summary = {"answers": answers, "seconds": round(time.monotonic() - begin_s, 1), **summary}
    return Outcome(summary, [json.dumps(summary)])


def _print(line: bytes) -> bool:
    """Print a line; return False once nobody reads, as behind `| head -1`."""
    try:
        sys.stdout.write(line.decode("ascii"))
        sys.stdout.flush()
    except BrokenPipeError:
        # What is printed from here on, also what the buffer still holds, goes nowhere.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return False
    return True


def _resolve(text: str) -> str:
    """Return a text with the path in it made absolute: the service has another working folder."""
    prefix = "file:" if text.startswith("file:") else ""
    path = text.removeprefix(prefix)
    is_path = prefix or (path and Path(path).exists())
    return prefix + os.path.abspath(path) if is_path else text  # noqa: PTH100
