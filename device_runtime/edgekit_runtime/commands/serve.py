"""`edgekit-device serve`."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgekit_runtime.commands.command import Outcome

if TYPE_CHECKING:
    from edgekit_runtime.service.options.config import ServiceConfig
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

Options = TypeVar("Options")

_logger = logging.getLogger(__name__)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve models over the Open Inference Protocol",
        description="Serve the installed models to the applications of this device, over a Unix socket and"
        " TCP, until SIGTERM or Ctrl-C. Requests under way are answered first.",
    )
    parser.add_argument(
        "--package",
        type=Path,
        action="append",
        default=[],
        metavar="PKG",
        help="package or folder of packages to serve instead of what is installed (may be repeated)",
    )
    parser.add_argument(
        "--tails",
        type=Path,
        action="append",
        default=[],
        metavar="PKG",
        help="package or folder of packages whose server parts are served to devices that split the model"
        " (may be repeated)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="TOML", help="configuration file, see docs/reference/service.md"
    )
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="MODEL",
        help="run this model in its own process, so that a crash of its engine stops nothing else (may be"
        " repeated)",
    )
    parser.add_argument("--unix-socket", metavar="PATH", help="path of the Unix socket to listen on")
    parser.add_argument("--port", type=int, help="TCP port, or 0 for any free one")
    parser.add_argument(
        "--grpc-port", type=int, help="also serve over gRPC, at this TCP port, or 0 for any free one"
    )
    parser.add_argument(
        "--grpc-unix-socket", metavar="PATH", help="also serve over gRPC, at this Unix socket"
    )
    parser.add_argument("--keys", type=Path, help="folder of trusted keys (default: your own)")
    parser.add_argument(
        "--print-unit",
        action="store_true",
        help="print a systemd unit of this service and exit",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    if arguments.print_unit:
        from edgekit_runtime.service.systemd import write_unit

        unit = write_unit()
        return Outcome({"unit": unit}, unit.splitlines())
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

    with VerifyingProcess(arguments.keys) as trust:  # first, so that its process starts beside these imports
        return _serve(arguments, trust)


def _serve(arguments: argparse.Namespace, trust: "VerifyingProcess") -> Outcome:
    import asyncio
    import contextlib
    import dataclasses
    import faulthandler

    from edgekit_runtime.service.models.file_source import PackageFiles
    from edgekit_runtime.service.models.slot_source import InstalledModels
    from edgekit_runtime.service.models.source import Source
    from edgekit_runtime.service.observability.traceback_limiter import TracebackLimiter
    from edgekit_runtime.service.server import serve
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.slots.access import hold_for_service
    from edgekit_runtime.system.paths import find_device_target, find_state_folder
    from edgekit_runtime.system.recent_log import keep_lines

    # The stack of a crash in an engine bears the model's name, see `name_frame`. By number, since
    # `sys.stderr` is None if this process was started without it.
    faulthandler.enable(2)
    config = _read_config(arguments)
    logging.getLogger("edgekit_runtime").setLevel((config.log.level or "info").upper())
    keep_lines()
    for handler in logging.getLogger().handlers:
        handler.addFilter(TracebackLimiter(handler))
        if config.log.json:
            from edgekit_runtime.service.observability.json_log import JsonLines

            handler.setFormatter(JsonLines())
    trust.check_keys()

    def announce(addresses: Sequence[str], models: Sequence[str]) -> None:
        trust.stop_when_idle()
        _logger.info("ready at %s", ", ".join(addresses))
        if not models:
            _logger.warning("there is no model to serve; next: %s", advice)

    source: Source
    advice = "edgekit-device install PACKAGE"
    with contextlib.ExitStack() as stack:
        if arguments.package or arguments.tails:
            folders = ", ".join(map(str, (*arguments.package, *arguments.tails)))
            advice = f"put packages into {folders} and start again"
            source = PackageFiles(arguments.package, trust, arguments.tails)
        else:
            from edgekit_runtime.protocol.samples import SAMPLES_FILE
            from edgekit_runtime.protocol.streams import STREAMS_FILE

            folder = find_state_folder()
            for name, file_name in (("fleet_streams", STREAMS_FILE), ("samples", SAMPLES_FILE)):
                wishes = getattr(config, name)
                if wishes.file is None:
                    wishes = dataclasses.replace(wishes, file=str(folder / "fleet" / file_name))
                    config = dataclasses.replace(config, **{name: wishes})
            stack.enter_context(hold_for_service(folder))
            source = InstalledModels(Slots(folder, trust, find_device_target()))
        has_ended = asyncio.run(serve(config, source, announce))
    return Outcome({"stopped": True}, ["stopped"], has_ended=has_ended)


def _read_config(arguments: argparse.Namespace) -> "ServiceConfig":
    import dataclasses

    from edgekit_runtime.service.options.config import ServiceConfig, isolate, read_config

    config = ServiceConfig() if arguments.config is None else read_config(arguments.config)
    listen = {"unix_socket": arguments.unix_socket, "port": arguments.port}
    grpc = {"unix_socket": arguments.grpc_unix_socket, "port": arguments.grpc_port}
    return dataclasses.replace(
        config,
        listen=_override(config.listen, listen, "listen"),
        grpc=_override(config.grpc, grpc, "grpc"),
        models=isolate(config.models, arguments.isolate),
    )


def _override(options: Options, stated: Mapping[str, Any], where: str) -> Options:
    from edgekit_runtime.dataclass_json import from_plain, to_plain

    changes = {name: value for name, value in stated.items() if value is not None}
    return from_plain(type(options), {**to_plain(options), **changes}, where)
