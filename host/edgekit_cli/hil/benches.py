"""`edgekit hil benches`: lists the benches that need no hardware."""

import click


@click.command("benches")
def command() -> None:
    """List the benches that need no hardware, and show which of them are in use or broken."""
    from edgekit_hil.benches.bench_file import list_shipped
    from edgekit_hil.benches.bench_lock import BenchLock
    from edgekit_host.terminal import open_console, print_section

    rows = []
    for bench in list_shipped():
        settings = bench.settings
        state = BenchLock.of(bench).describe() or "free"
        rows.append((settings.name, settings.kind, settings.target, state))
    print_section(open_console(), "Benches", rows)
