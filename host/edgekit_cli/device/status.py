"""`edgekit device status`: shows facts about a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekit_cli.device.device_options import (
    host_option,
    parse_host,
    ssh_config_option,
)
from edgekit_cli.shared_options import as_json_option


@click.command("status")
@host_option
@ssh_config_option
@as_json_option
def command(*, host: str, ssh_config: Path | None, as_json: bool) -> None:
    """Show facts about a device, and the state of edgekit on it."""
    device = parse_host(host, ssh_config)
    from edgekit_hil.provisioning.install import probe
    from edgekit_host.terminal import open_console, print_section
    from edgekit_runtime.dataclass_json import to_plain

    facts = probe(device, has_models=True)
    models = json.loads(facts.models)["models"] if facts.models else []
    if as_json:
        click.echo(json.dumps({"host": host, **to_plain(facts), "models": models}, indent=2))
        return
    pythons = ", ".join(f"{python.version} ({python.path})" for python in facts.pythons)
    tensorrt = any(python.has_tensorrt for python in facts.pythons)
    rows = [
        ("device", f"{facts.model or 'unknown board'}, {facts.machine}"),
        ("system", f"{facts.system}, {facts.libc}"),
        ("Python", pythons or "none"),
        ("TensorRT", "yes" if tensorrt else "no"),
        ("free disk", f"{facts.free_bytes / 1e6:.0f} MB"),
        ("rights", facts.rights),
        ("release", facts.release or "edgekit is not installed"),
        ("before it", facts.previous or "none"),
        ("service", facts.service or "systemd does not run"),
        ("agent", facts.agent or "systemd does not run"),
        ("fleet", facts.device or "in none"),
        ("keys", ", ".join(facts.keys) or "none"),
    ]
    console = open_console()
    print_section(console, host, rows)
    print_section(
        console, "Models", [(model["model"], model["opens"] or model.get("why")) for model in models]
    )
