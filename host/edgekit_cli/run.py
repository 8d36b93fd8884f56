"""`edgekit run`: runs a verified package on samples, and shows the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.sessions import Session
    from edgekit_toolkit.evaluation.batch_inference import Inference

_MAX_SHOWN = 10  # samples whose classes are printed. JSON has all


@click.command("run")
@click.argument("package", type=click.Path(path_type=Path))
@click.option(
    "--input",
    "input_path",
    type=click.Path(path_type=Path),
    help="Samples: a JPEG, PNG or WAV file, an .npz with one array [N, ...] per input, a .npy, or a folder"
    " of these.  [default: the golden inputs of the package]",
)
@click.option(
    "--output", "output_path", type=click.Path(path_type=Path), help="Write the outputs to this .npz file."
)
@click.option("--variant", help="Run this variant.  [default: the tournament's winner here, else the first]")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of one inference.  [default: as packaged]"
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    help="Run the first batch again this number of times, and measure its latency.",
)
@as_json_option
def command(
    package: Path,
    *,
    input_path: Path | None,
    output_path: Path | None,
    variant: str | None,
    threads: int | None,
    repeat: int | None,
    as_json: bool,
) -> None:
    """Verify PACKAGE, run it on samples, and show the shape, range and best classes of its outputs.

    If the model has a fixed batch size, it runs batches of this size. Otherwise it runs one sample at a time.
    """
    import contextlib

    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.system.atomic_files import check_target
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore

    if output_path is not None:
        check_target(output_path)
    trust = TrustStore.from_folder(find_keys_folder())
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(read_package(package, trust))
        variant, session = _open_session(opened, variant, threads)
        stack.callback(session.close)
        # Only now, since it imports engines; a missing one has been named by open_session.
        from edgekit_toolkit.evaluation.batch_inference import decode_answers, read_class_names, write_npz

        class_names = read_class_names(opened)
        result = _run(session, opened, variant, input_path)
        if output_path is not None:
            write_npz(output_path, result.outputs)
        answers = [] if input_path is None else decode_answers(opened, result)
        timing = _time(session, result, repeat) if repeat else None
    document = {
        "path": str(package),
        "key_id": opened.key_id,
        "variant": variant,
        "input": None if input_path is None else str(input_path),
        "samples": result.samples,
        "files": list(result.names),
        "batch": result.batch,
        "outputs": [_describe(name, array, class_names) for name, array in result.outputs.items()],
        "answers": answers,
        "output": None if output_path is None else str(output_path),
        "timing": timing,
    }
    if as_json:
        import json

        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)


def _run(session: Session, package: OpenedPackage, variant: str, input_path: Path | None) -> Inference:
    from edgekit_toolkit.evaluation.batch_inference import (
        package_decoding,
        run_golden,
        run_samples,
        run_sequences,
    )

    if input_path is None:
        return run_golden(session, package.select(variant))
    decoding = package_decoding(package)
    if package.manifest.states:
        return run_sequences(session, package.manifest, input_path, decoding)
    return run_samples(session, package.manifest.inputs, input_path, decoding)


def _open_session(opened: OpenedPackage, variant: str | None, threads: int | None) -> tuple[str, Session]:
    from edgekit_runtime.sessions import open_preferred, open_session
    from edgekit_runtime.sessions.opening.package_opening import check_first_opening
    from edgekit_toolkit.openings.model_opening import PACKAGE_LIMIT_S

    variants = [] if variant is None else [variant]
    check_first_opening(opened, variants=variants, threads=threads, limit_s=PACKAGE_LIMIT_S)
    if variant is None:
        return open_preferred(opened, threads)
    return variant, open_session(opened, variant=variant, threads=threads)


def _time(session: Session, result: Inference, repeat: int) -> dict[str, Any]:
    from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency

    limits = LatencyLimits(min_rounds=repeat, max_rounds=repeat)
    latency = measure_latency({"": lambda: session.run(result.first)}, limits)[""]
    lower_s, upper_s = latency.quartiles_s
    return {
        "runs": repeat,
        "median_ms": latency.median_s * 1e3,
        "lower_quartile_ms": lower_s * 1e3,
        "upper_quartile_ms": upper_s * 1e3,
        "label": "measured",
        "on": "this machine",
    }


def _describe(name: str, array: NDArray[Any], class_names: Sequence[str]) -> dict[str, Any]:
    """Return facts about an output, with null for NaN and infinities, which JSON lacks."""
    import numpy as np

    from edgekit_toolkit.evaluation.batch_inference import find_top_classes

    finite = array[np.isfinite(array)]
    return {
        "name": name,
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "min": finite.min().item() if finite.size else None,
        "max": finite.max().item() if finite.size else None,
        "non_finite": array.size - finite.size,
        "top_classes": [
            [
                {"index": index, "label": class_names[index], "score": score if np.isfinite(score) else None}
                for index, score in best
            ]
            for best in find_top_classes(array, len(class_names))
        ],
    }


def _show(document: Mapping[str, Any]) -> None:
    from edgekit_host.terminal import open_console, print_line, print_section
    from edgekit_runtime.package.variants import DEFAULT_VARIANT
    from edgekit_toolkit.tasks.answer_text import list_entries

    console = open_console()
    source = document["input"] or "the golden inputs"
    if document["variant"] != DEFAULT_VARIANT:
        print_line(console, "variant", document["variant"], indent=2)
    samples = "1 sample" if document["samples"] == 1 else f"{document['samples']} samples"
    print_line(console, "verified, by the trusted key", document["key_id"], indent=2)
    print_line(console, f"{samples} of {source}, run {document['batch']} at a time", indent=2)
    print_section(console, "Outputs", [_output_row(output) for output in document["outputs"]])
    for output in document["outputs"]:
        best = output["top_classes"]
        names = document["files"] or [f"sample {index}" for index in range(len(best))]
        rows = [(name, _classes(row)) for name, row in zip(names, best[:_MAX_SHOWN], strict=False)]
        if len(best) > _MAX_SHOWN:
            rows.append(("...", f"{len(best) - _MAX_SHOWN} further samples: --json shows all"))
        print_section(console, f"Best classes of {output['name']}", rows)
    names = document["files"] or [f"sample {index}" for index in range(len(document["answers"]))]
    answers = [
        (name, "; ".join(list_entries(answer, with_places=True)) or "nothing")
        for name, answer in zip(names, document["answers"], strict=False)
    ]
    if answers:
        print_section(console, "Answers", answers[:_MAX_SHOWN])
    if document["timing"] is not None:
        print_section(console, "Latency", _timing_rows(document["timing"], document["batch"]))
    if document["output"] is not None:
        console.print()
        print_line(console, "outputs written to", document["output"], indent=2)


def _output_row(output: Mapping[str, Any]) -> tuple[str, str, str]:
    low, high = output["min"], output["max"]
    values = "no finite value" if low is None else f"{low:.6g} to {high:.6g}"
    if output["non_finite"]:
        values += f", {output['non_finite']} NaN or infinite"
    return output["name"], f"{output['dtype']} {output['shape']}", values


def _classes(best: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{item['label']} {'n/a' if item['score'] is None else format(item['score'], '.3g')}" for item in best
    )


def _timing_rows(timing: Mapping[str, Any], batch: int) -> list[tuple[str, str]]:
    origin = f"{timing['label']}, {timing['on']}; {timing['runs']} runs of {batch} at a time"
    return [
        ("median", f"{timing['median_ms']:.4g} ms ({origin})"),
        ("middle half", f"{timing['lower_quartile_ms']:.4g} to {timing['upper_quartile_ms']:.4g} ms"),
    ]
