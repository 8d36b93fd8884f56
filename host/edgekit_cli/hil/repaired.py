"""`edgekit hil repaired`: marks a bench as repaired."""

import click


@click.command("repaired")
@click.argument("bench", metavar="FILE")
def command(bench: str) -> None:
    """Mark a bench as repaired. FILE is its environment file, or its name in `edgekit hil benches`."""
    from edgekit_hil.benches.bench_file import find_bench
    from edgekit_hil.benches.bench_lock import BenchLock

    file = find_bench(bench)
    reason = BenchLock.of(file).mark_repaired()
    name = file.settings.name
    click.echo(f"{name} was not broken" if reason is None else f"{name} is in order again; it was: {reason}")
