"""`edgekit inspect`: shows the contents of a package, even from an untrusted key, or of a `.tflite` model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from edgekit_runtime.canonical_json import JsonValue
    from edgekit_runtime.errors import SignatureError
    from edgekit_runtime.package.golden import Golden
    from edgekit_runtime.package.manifest import Manifest, Variant
    from edgekit_runtime.package.manifest_entries import BackendChoice
    from edgekit_runtime.trust.trust_store import TrustStore

_MAX_DEPTH = 3  # levels of free JSON that are shown as rows. Deeper ones are shown as JSON
_MAX_WHOLE = 1e15  # below this a float holds every whole number
_MAX_SHOWN = 1e300  # JSON allows larger integers, which no float holds


class PackageEvidence(NamedTuple):
    """The evidence file next to a package.

    Attributes:
        verified: Whether the key of the signer is trusted on this machine.
        predicate: The content, which is empty if there is a problem.
        problem: Why the file is not valid evidence for the package, or None.
    """

    path: Path
    verified: bool
    predicate: Mapping[str, JsonValue]
    problem: str | None = None


class Inspection(NamedTuple):
    """The content of a package.

    Attributes:
        verified: Whether the package is signed with a trusted key. Otherwise `key_id` is only a claim.
        key_name: The name of the key on this machine, or None.
        evidence: The evidence file of the package, or None.
    """

    path: Path
    manifest: Manifest
    verified: bool
    key_id: str
    key_name: str | None
    evidence: PackageEvidence | None


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
def command(file: Path, *, as_json: bool) -> None:
    """Show the contents of FILE, which is a package or a .tflite model.

    The format and digests of a package are checked. A package from an untrusted key is also shown but marked
    UNVERIFIED, and no part of it is run. For a package that is encrypted for other devices, only the header
    is shown. A .tflite model is run on zeros in a separate process.
    """
    from edgekit_runtime.errors import ManifestError
    from edgekit_toolkit.importers.file_kind import is_tflite

    if file.suffix == ".tflite" or is_tflite(file):
        from edgekit_cli.inspect_tflite import show_tflite

        show_tflite(file, as_json=as_json)
        return
    if _is_closed(file):
        _show_header(file, as_json=as_json)
        return
    inspection = _inspect_package(file)
    try:
        if as_json:
            _print_json(inspection)
        else:
            _show(inspection)
    except RecursionError as cause:
        raise ManifestError(f"{file}: its manifest or evidence is nested too deeply to be shown") from cause


def _is_closed(path: Path) -> bool:
    """Return whether `path` is an encrypted package that this machine has no key for."""
    from edgekit_runtime.encryption.container import EncryptionError, is_encrypted, read_header
    from edgekit_runtime.encryption.opening import find_content_key

    if not is_encrypted(path):
        return False
    header = read_header(path)  # its errors are those of a damaged file
    try:
        find_content_key(path, header)
    except EncryptionError:
        return True
    return False


def _show_header(path: Path, *, as_json: bool) -> None:
    import json

    from edgekit_host.terminal import open_console, print_line, print_section
    from edgekit_runtime.encryption.container import read_header

    header = read_header(path)
    if as_json:
        click.echo(json.dumps({"path": str(path), "encrypted": header.to_json()}, indent=2))
        return
    console = open_console()
    print_line(console, (f"{path.name}: encrypted, and not for this machine", "bold"))
    rows = [("content key", header.key_id), ("plaintext", f"{header.plain_bytes:,} bytes")]
    print_section(console, "Header", rows)
    devices = [(device,) for device in header.recipients] or [("none here: the key travels beside the file",)]
    print_section(console, "For the devices", devices)


def _inspect_package(path: Path) -> Inspection:
    """Return the contents of a package.

    Raises:
        PackageError: The file is not a package. The message says what it is, if known.
    """
    from edgekit_runtime.errors import PackageError
    from edgekit_toolkit.importers.file_kind import describe_no_package

    try:
        return _inspect(path)
    except PackageError as error:
        words = describe_no_package(path)
        if words is None:
            raise
        raise PackageError(f"{path}: no package, but {words}") from error


def _inspect(path: Path) -> Inspection:
    from edgekit_runtime.errors import SignatureError
    from edgekit_runtime.package.archive import read_package, read_unverified_manifest
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore
    from edgekit_toolkit.packaging.signing_keys import list_keys

    trust = TrustStore.from_folder(find_keys_folder())
    names = {key.key_id: key.name for key in list_keys()}
    try:
        with read_package(path, trust) as package:
            manifest, key_id, verified = package.manifest, package.key_id, True
    except SignatureError as error:
        if not _is_by_unknown_key(error, trust):
            raise
        unverified = read_unverified_manifest(path)
        manifest, key_id, verified = unverified.manifest, unverified.claimed_key_id, False
    return Inspection(path, manifest, verified, key_id, names.get(key_id), _find_evidence(path, trust))


def _is_by_unknown_key(error: SignatureError, trust: TrustStore) -> bool:
    """Return whether the key is unknown here, so that the signature cannot be verified."""
    return error.key_id is not None and error.key_id not in trust.key_ids


def _find_evidence(package: Path, trust: TrustStore) -> PackageEvidence | None:
    from edgekit_runtime.errors import DigestError, SignatureError
    from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence, read_unverified_evidence

    path = evidence_path(package)
    if not path.exists():
        return None
    try:
        try:
            return PackageEvidence(path, True, read_evidence(path, package, trust).predicate)
        except SignatureError as error:
            if not _is_by_unknown_key(error, trust):
                raise
            return PackageEvidence(path, False, read_unverified_evidence(path, package).predicate)
    except (SignatureError, DigestError) as error:
        return PackageEvidence(path, False, {}, str(error))


def _print_json(inspection: Inspection) -> None:
    import json

    evidence = inspection.evidence
    document = {
        "path": str(inspection.path),
        "verified": inspection.verified,
        "key_id": inspection.key_id,
        "key_name": inspection.key_name,
        "manifest": json.loads(inspection.manifest.to_bytes()),
        "evidence": None if evidence is None else {**evidence._asdict(), "path": str(evidence.path)},
    }
    click.echo(json.dumps(document, indent=2))


def _show(inspection: Inspection) -> None:
    from edgekit_host.terminal import open_console, print_line, print_section

    console, manifest = open_console(), inspection.manifest
    if not inspection.verified:
        notice = "signed by a key that is not trusted here, so anybody can have written what follows."
        print_line(console, ("UNVERIFIED:", "bold red"), notice, indent=12)
        print_line(console, "If you know the owner of the key: edgekit keys trust PUBLIC_KEY.pem NAME")
        console.print()
    print_line(console, (f"{manifest.name} {manifest.version} for {manifest.target}", "bold"))
    trusted = f"as {inspection.key_name}" if inspection.verified else "NO"
    print_section(console, "Signature", [("key", inspection.key_id), ("trusted", trusted)])
    for title, specs in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs)):
        print_section(console, title, [(spec.name, _type(spec.dtype, spec.shape)) for spec in specs])
    states = [(state.output, f"is {state.input} of the next run") for state in manifest.states]
    print_section(console, "States", states)
    print_section(console, "Artifacts", _artifact_rows(manifest))
    print_section(console, "Weights", _weight_rows(inspection))
    print_section(console, "Stages", _stage_rows(manifest))
    print_section(console, "Backend", _backend_rows(manifest.backend))
    print_section(console, "Budget", _free_rows(manifest.budget))
    print_section(console, "Figures", _figure_rows(manifest.figures))
    print_section(console, "Golden self-test", _golden_rows(manifest.golden))
    for variant in manifest.variants:
        print_section(console, f"Variant {variant.name}", _variant_rows(variant))
    print_section(console, "Provenance", _free_rows(manifest.provenance))
    _show_evidence(console, inspection.evidence)


def _show_evidence(console: Console, evidence: PackageEvidence | None) -> None:
    from edgekit_host.terminal import print_line, print_section

    if evidence is None:
        return
    console.print()
    if evidence.problem is not None:
        print_line(console, ("NO EVIDENCE:", "bold red"), evidence.problem, indent=13)
        return
    state = "verified" if evidence.verified else "UNVERIFIED: by a key that is not trusted here"
    print_line(console, ("Evidence", "bold"), f"{evidence.path.name} ({state})")
    print_section(console, "What it states", _free_rows(evidence.predicate))


def _type(dtype: str, shape: tuple[int | str, ...]) -> str:
    return f"{dtype} [{', '.join(map(str, shape))}]"


def _artifact_rows(manifest: Manifest) -> Iterator[tuple[str]]:
    for artifact in manifest.artifacts:
        yield (f"{artifact.path} ({artifact.role}, {artifact.size_bytes:,} bytes)",)
        yield (f"sha256 {artifact.sha256}",)  # with its path in one row it would not fit into 80 columns


def _weight_rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the shape and the bits of each weight with 8-bit codes, in file order."""
    import numpy as np

    from edgekit_host.transport.package_encoder import list_tensors
    from edgekit_runtime.package.archive import DEFAULT_LIMITS
    from edgekit_runtime.package.package_file import map_file
    from edgekit_toolkit.compress.compression import count_bits, entropy_bits

    content = bytes(map_file(inspection.path, DEFAULT_LIMITS.max_package_bytes).content)
    for tensor in list_tensors(content):
        if tensor.is_signed is not None and len(tensor.shape) > 1:
            codes = np.frombuffer(content, np.int8, tensor.length, tensor.offset)
            shape = " x ".join(map(str, tensor.shape))
            yield shape, f"{count_bits(codes)} bits, {entropy_bits(codes) / len(codes):.1f} as they travel"


def _stage_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for stage in () if manifest.pipeline is None else manifest.pipeline.stages:
        runs = (
            f"{stage.ensemble} of {', '.join(stage.stages)}" if stage.ensemble else " or ".join(stage.engines)
        )
        of = f"at most {stage.max_crops} crops of the boxes of {stage.input}" if stage.crop else stage.input
        yield stage.name, f"{runs}, on {of}"


def _backend_rows(backend: BackendChoice) -> Iterator[tuple[str, str]]:
    for index, choice in enumerate(backend.chain):
        options = ", ".join(f"{name} {_value(value)}" for name, value in choice.options.items())
        text = f"{choice.name} runs {choice.artifact}; options: {options or 'none'}"
        yield "fallback" if index else "first", text
    if backend.fallback is None:
        yield "fallback", "none"


def _variant_rows(variant: Variant) -> Iterator[tuple[str, str]]:
    yield from _backend_rows(variant.backend)
    for kind, name, text in _golden_rows(variant.golden):
        if kind == "output":  # its inputs are very probably those of the default
            yield f"{kind} {name}", text
    yield from _figure_rows(variant.figures)


def _golden_rows(golden: Golden) -> Iterator[tuple[str, str, str]]:
    for tensor in golden.inputs:
        text, codes = _type(tensor.dtype, tensor.shape), tensor.codes
        if codes:
            text += f", {codes.dtype} codes * {codes.scale:g} + {codes.offset:g}"
            text += "" if codes.repeat is None else f", each for {list(codes.repeat)} values"
        yield "input", tensor.name, text
    for output in golden.outputs:
        text = f"{_type(output.dtype, output.shape)}, within {output.atol:g} + {output.rtol:g} * |expected|"
        unit = "value" if output.axis is None else "row"
        text += "" if output.every == 1 else f", every {output.every}. {unit}"
        if output.axis is not None:
            text += f", a set of rows: {output.loose} may differ, their number by {output.count_atol}"
        yield "output", output.name, text
    if golden.rows is not None:
        count = len(golden.rows.seeds)
        yield "rows", f"{count} more", f"drawn from the inputs by the seeds {_value(list(golden.rows.seeds))}"


def _figure_rows(figures: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    """Return the rows of figures. For `reference`, which has tables for devices, only show that it exists."""
    yield from _free_rows({name: value for name, value in figures.items() if name != "reference"})
    if "reference" in figures:
        reference = figures["reference"]
        samples = reference.get("samples") if isinstance(reference, dict) else None
        yield "reference", f"of {_value(samples)} calibration samples, for drift (--json shows it)"


def _free_rows(
    values: Mapping[str, JsonValue], prefix: str = "", depth: int = 1, origin: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each value in a JSON object. Nested objects give dotted names.

    The `origin` of a figure, which is its label and place, follows in parentheses.
    """
    for name, value in values.items():
        if not isinstance(value, dict) or value.keys() <= {"label", "on"} or depth == _MAX_DEPTH:
            yield f"{prefix}{name}", _number(name, value) + (f" ({origin})" if origin else "")
            continue
        inner = {key: item for key, item in value.items() if key not in ("label", "on")}
        stated = ", ".join(_value(value[key]) for key in ("label", "on") if key in value) or origin
        if "value" in inner:
            yield f"{prefix}{name}", _figure(name, inner, stated)
        else:
            yield from _free_rows(inner, f"{prefix}{name}.", depth + 1, stated)


def _figure(name: str, figure: Mapping[str, JsonValue], origin: str) -> str:
    unit = figure.get("unit")
    further = [f"{key} {_value(item)}" for key, item in figure.items() if key not in ("value", "unit")]
    text = _number(name, figure["value"], unit if isinstance(unit, str) else None)
    notes = ", ".join(([origin] if origin else []) + further)
    return f"{text} ({notes})" if notes else text


def _number(name: str, value: JsonValue, unit: str | None = None) -> str:
    """Return a value with its unit, which follows from the name of the figure or limit."""
    from edgekit_toolkit.report.figures import FIGURES, show

    unit = unit or FIGURES.get(name, ("", ""))[1]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not unit or abs(value) > _MAX_SHOWN:
        return _value(value)
    return show(value, unit)


def _value(value: JsonValue) -> str:
    import json

    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < _MAX_WHOLE else f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)
