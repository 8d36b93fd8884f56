"""Adds offloading plans to a package: the cut table, and heads and tails as submodels.

The whole model is not changed. With an ed25519 key, the same inputs always give the same file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_offload.partition.split import DECODER_SUFFIX, Part, SplitModels
from edgekit_runtime.canonical_json import JsonValue, encode_json
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import BackendError, CutError
from edgekit_runtime.offload.cut_table import CODED_PLANS_ROLE, CUT_TABLE_ROLE, TABLE_ROLES, CutTable
from edgekit_runtime.package.archive import OpenedPackage, Sign, write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Artifact, BackendChoice, Manifest, Submodel
from edgekit_runtime.package.submodels import served_name
from edgekit_runtime.sessions.options import DECODE, read_options
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.models.integer_division import onnx_divides_by_inputs
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.golden_tensors import golden_input, golden_outputs
from edgekit_toolkit.samples.generated import Feeds

OFFLOAD: Final = "offload"
_FOLDER: Final = "submodels"
_MODEL: Final = "model.onnx"
_ENGINE: Final = "ort"  # the engine of submodels
# If another processor rounds differently, the end of a group's range moves, and its codes by 16 and one more:
# see `coding.py`. For two 4-bit codes in a byte, one more is 17.
_GROUP_ATOL: Final = 17.0
_WIDE_ATOL: Final = 328.0  # of 65535: half a percent, by which floats may be off
_LATTICE_ATOL: Final = 2.0  # in a difference: a code and the one before it
_INTEGER_ATOL: Final = 17.0  # a step or two in each layer of an int8 model


def attach_plans(
    package: OpenedPackage,
    splits: Mapping[str, SplitModels],
    table: CutTable,
    *,
    folder: Path,
    sign: Sign,
    decode: Mapping[str, Mapping[str, str]] | None = None,
    version: str | None = None,
) -> Path:
    """Write a package with plans, and return its path. Previous plans are replaced.

    Args:
        package: The package. Its default variant must run in onnxruntime.
        splits: A dict from the name of a plan or cut to the head and tail of the default variant's model.
        table: The cut table, in which submodels are called `NAME.head` and `NAME.tail`. In the package, each
            tail gets the name under which a server serves it.
        folder: The folder for the new package, which gets its usual file name.
        sign: Returns the signed envelope of a manifest.
        decode: A dict from a name in `splits` to a dict from an input of the tail to its media codec.
        version: The version of the new package, by default that of `package`.

    Raises:
        CutError: The model does not run in onnxruntime, or the table names a missing submodel.
        BackendError: A submodel does not run on the golden inputs.
        OutputError: The package cannot be written.
    """
    plain, contents = _without_plans(package)
    whole = _find_ort(plain)
    roles = {artifact.path: artifact.role for artifact in plain.artifacts}
    submodels: list[Submodel] = []
    for name, split in splits.items():
        writer = _SubmodelWriter(plain, whole, contents)
        for submodel, artifacts in writer.write(name, split, (decode or {}).get(name, {})):
            submodels.append(submodel)
            contents |= artifacts
            golden = dict.fromkeys(artifacts, "golden")
            roles |= {**golden, submodel.backend.artifact: "submodel"}
    described = {artifact.path: artifact for artifact in describe_artifacts(contents, roles)}
    tables = _write_tables(_with_codes(table, splits), plain.name, submodels, described)
    contents |= {f"{role}.json": encode_json(content) for role, content in tables.items()}
    roles |= {f"{role}.json": role for role in tables}
    manifest = replace(
        plain,
        version=version or plain.version,
        artifacts=describe_artifacts(contents, roles),
        # A runtime without this backend uses the fallback: it runs the whole model, as before.
        backend=BackendChoice(OFFLOAD, whole.artifact, whole.options, plain.backend),
        submodels=tuple(submodels),
    )
    path = folder / manifest.file_name
    write_package(path, manifest, contents, sign)
    return path


def write_tail_package(tail: OpenedPackage, content: bytes, *, folder: Path, sign: Sign) -> Path:
    """Write a tail as a package with the name that devices request, and return its path.

    Args:
        tail: The package of the whole model with the tail selected (`select_submodel`).
        content: The tail as an ONNX model with its weights.
        folder: The folder for the package.
        sign: Returns the signed envelope of a manifest.

    Raises:
        OutputError: The package cannot be written.
    """
    source = tail.manifest
    contents, roles = {_MODEL: content}, {_MODEL: "model"}

    def move(path: str) -> str:
        moved = f"golden/{Path(path).name}"
        contents[moved], roles[moved] = bytes(tail.read(path)), "golden"
        return moved

    golden = Golden(
        tuple(replace(golden, path=move(golden.path)) for golden in source.golden.inputs),
        tuple(replace(golden, path=move(golden.path)) for golden in source.golden.outputs),
    )
    options = {name: value for name, value in source.backend.options.items() if name != "weights"}
    manifest = replace(
        source,
        artifacts=describe_artifacts(contents, roles),
        backend=BackendChoice("ort", _MODEL, options),
        golden=golden,
        figures={},
    )
    path = folder / manifest.file_name
    write_package(path, manifest, contents, sign)
    return path


def _without_plans(package: OpenedPackage) -> tuple[Manifest, dict[str, bytes]]:
    """The package as it was before plans were added."""
    manifest = package.manifest
    dropped = {
        artifact.path for artifact in manifest.artifacts if artifact.role in ("submodel", *TABLE_ROLES)
    }
    dropped |= {artifact.path for artifact in manifest.artifacts if artifact.path.startswith(f"{_FOLDER}/")}
    backend = manifest.backend
    if backend.name == OFFLOAD and backend.fallback is not None:
        backend = backend.fallback
    artifacts = tuple(artifact for artifact in manifest.artifacts if artifact.path not in dropped)
    plain = replace(manifest, artifacts=artifacts, submodels=(), backend=backend)
    return plain, {artifact.path: bytes(package.read(artifact.path)) for artifact in artifacts}


def _find_ort(manifest: Manifest) -> BackendChoice:
    for choice in manifest.backend.chain:
        if choice.name == _ENGINE:
            return choice
    names = ", ".join(choice.name for choice in manifest.backend.chain)
    raise CutError(
        f"{manifest.file_name}: its model runs in {names}, expected onnxruntime (backend 'ort'); package the"
        " model for a target that uses it"
    )


class _SubmodelWriter:
    def __init__(self, manifest: Manifest, whole: BackendChoice, contents: Mapping[str, bytes]) -> None:
        self._whole = whole
        self._weights = contents[whole.artifact]
        self._golden = {golden.name: golden for golden in manifest.golden.inputs}
        self._contents = contents

    def write(
        self, stem: str, split: SplitModels, decode: Mapping[str, str]
    ) -> Iterator[tuple[Submodel, dict[str, bytes]]]:
        """Yield head and tail of a split, each with its artifacts, some of which may exist already."""
        golden_feeds = {
            name: golden.decode(self._contents[golden.path]) for name, golden in self._golden.items()
        }
        head_outputs: Mapping[str, NDArray[Any]] = {}
        if split.head is not None:
            name = f"{stem}.head"
            own = {spec.name: self._golden[spec.name] for spec in split.head.inputs}
            head_outputs = self._run(name, split.head, {spec: golden_feeds[spec] for spec in own})
            contents = {golden.path: self._contents[golden.path] for golden in own.values()}
            yield self._submodel(name, split.head, (tuple(own.values()), contents), head_outputs)
        name = f"{stem}.tail"
        inputs, contents, feeds = [], {}, {}
        specs = {spec.name: spec for spec in split.sent}
        for spec in split.sent:
            value = head_outputs[spec.name] if spec.name in head_outputs else golden_feeds[spec.name]
            if spec.name in decode:
                value, feeds[spec.name] = _as_file(value, decode[spec.name])
                specs[spec.name] = TensorSpec(spec.name, "uint8", (f"{spec.name}_bytes",))
            path = _path(golden_input(spec.name, value, "golden")[1])
            golden, data = golden_input(spec.name, value, path)
            inputs.append(golden)
            contents[path] = data
            feeds.setdefault(spec.name, golden.decode(data))
        outputs = self._run(name, split.tail, feeds)
        part = replace(split.tail, inputs=tuple(specs.values()))
        submodel, artifacts = self._submodel(name, part, (tuple(inputs), contents), outputs)
        if decode:
            options = {**submodel.backend.options, DECODE: dict(decode)}
            backend = replace(submodel.backend, options=options)
            submodel = replace(submodel, backend=backend)
        yield submodel, artifacts
        if split.decoder is not None:
            inputs, contents = [], {}
            for spec in split.decoder.inputs:
                path = _path(golden_input(spec.name, outputs[spec.name], "golden")[1])
                golden, contents[path] = golden_input(spec.name, outputs[spec.name], path)
                inputs.append(golden)
            name = f"{stem}{DECODER_SUFFIX}"
            restored = self._run(
                name, split.decoder, {spec: outputs[spec] for spec in (i.name for i in inputs)}
            )
            yield self._submodel(name, split.decoder, (tuple(inputs), contents), restored)

    def _submodel(
        self,
        name: str,
        part: Part,
        inputs: tuple[tuple[GoldenInput, ...], Mapping[str, bytes]],
        outputs: Mapping[str, NDArray[Any]],
    ) -> tuple[Submodel, dict[str, bytes]]:
        graph = f"{_FOLDER}/{name}.onnx"
        golden, expected = _expected(outputs, part.content)
        model, weights_bytes = fill_weights(part.content, self._weights)
        submodel = Submodel(
            name=name,
            inputs=part.inputs,
            outputs=part.outputs,
            backend=BackendChoice("ort", graph, self._options(part)),
            golden=Golden(inputs[0], golden),
            weights_bytes=weights_bytes,
            divides_integers=onnx_divides_by_inputs(model),
        )
        return submodel, {graph: part.content, **inputs[1], **expected}

    def _options(self, part: Part) -> dict[str, JsonValue]:
        options = dict(self._whole.options)
        return {**options, "weights": self._whole.artifact} if part.reads_weights else options

    def _run(self, name: str, part: Part, feeds: Feeds) -> dict[str, NDArray[Any]]:
        # One thread: how a sum is split among threads decides about its last bits.
        options = read_options(OrtOptions, "ort", self._options(part), 1)
        whole, _ = fill_weights(part.content, self._weights)
        check_opening("ort", whole.SerializeToString(), self._whole.options)
        session = OrtSession(part.content, options, self._weights)
        try:
            outputs = session.run(feeds)
        except BackendError as cause:
            raise BackendError(f"submodel '{name}' does not run on its golden inputs: {cause}") from cause
        finally:
            session.close()
        if bad := [
            name for name, value in outputs.items() if value.dtype.kind == "f" and np.isnan(value).any()
        ]:
            raise BackendError(f"submodel '{name}': {bad[0]} is NaN for the golden inputs of the package")
        return outputs


def fill_weights(content: bytes, weights: bytes | memoryview) -> tuple[onnx.ModelProto, int]:
    """Return a submodel that contains its weights, and the number of bytes of `weights` that it uses.

    `content` is the ONNX file of the submodel. `weights` is the file of the whole model.

    Raises:
        CutError: A weight is outside the file.
    """
    model = onnx.load_model_from_string(content)
    locations = set()
    for tensor in model.graph.initializer:
        if tensor.external_data:
            external = {entry.key: entry.value for entry in tensor.external_data}
            start, size_bytes = int(external["offset"]), int(external["length"])
            if not 0 <= start <= start + size_bytes <= len(weights):
                raise CutError(
                    f"weight '{tensor.name}' lies outside the model's file; package the model again"
                )
            locations.add((start, size_bytes))
            tensor.raw_data = bytes(weights[start : start + size_bytes])
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    return model, sum(size_bytes for _, size_bytes in locations)


def _as_file(value: NDArray[Any], codec: str) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return the file of a photograph or a sound [1, ...], and the array that a server decodes from it."""
    media = MediaCodec.parse(codec)
    content = encode_media(media, value[0])
    channels = 1 if value.shape[-1] == 1 else 3
    decoded = decode_media(media, content, dtype=value.dtype.name, channels=channels)
    return np.frombuffer(content, np.uint8), decoded[np.newaxis]


def _expected(
    outputs: Mapping[str, NDArray[Any]], content: bytes
) -> tuple[tuple[GoldenOutput, ...], dict[str, bytes]]:
    """Expected outputs of a part; artifacts are named after their content, since submodels share many.

    A part is compared with itself, so only the rounding of another processor is tolerated.
    """
    nodes = onnx.load_from_string(content).graph.node
    integer = any("Quantize" in node.op_type or "Integer" in node.op_type for node in nodes)
    integer |= any(node.op_type.startswith("QLinear") for node in nodes)
    described, artifacts = golden_outputs(outputs, outputs, integer=integer)
    moved = {path: _path(data) for path, data in artifacts.items()}
    renamed = tuple(
        replace(node, path=moved[node.path], atol=_code_atol(node, outputs, integer=integer) or node.atol)
        for node in described
    )
    return renamed, {moved[path]: data for path, data in artifacts.items()}


def _code_atol(output: GoldenOutput, outputs: Mapping[str, NDArray[Any]], *, integer: bool) -> float:
    """Return how far codes may be off; 0 for an output without codes."""
    tensor, _, kind = output.name.rpartition(".")
    if kind in ("codes", "ends") and f"{tensor}.range" in outputs:
        return _GROUP_ATOL if output.dtype == "uint8" else _WIDE_ATOL
    if output.dtype in ("uint8", "int8", "int16"):
        return _INTEGER_ATOL if integer else _LATTICE_ATOL
    return 0.0


def _path(data: bytes) -> str:
    return f"{_FOLDER}/golden/{hashlib.sha256(data).hexdigest()[:16]}.bin"


def _with_codes(table: CutTable, splits: Mapping[str, SplitModels]) -> CutTable:
    """Return the table with the values of the inputs that each head can code."""
    codes = {f"{name}.tail": split.codes for name, split in splits.items()}
    plans = tuple(replace(plan, codes=codes.get(plan.tail or "", {})) for plan in table.plans)
    return replace(table, plans=plans)


def _write_tables(
    table: CutTable, model: str, submodels: list[Submodel], artifacts: Mapping[str, Artifact]
) -> dict[str, JsonValue]:
    """The cut table, and apart from it plans with a decoder, by roles; tails as a server names them.

    Older devices skip those. If there are no others, the table holds them, and older devices refuse it.
    """
    named = {submodel.name: submodel for submodel in submodels}
    plans = []
    for plan in table.plans:
        for submodel in (plan.head, plan.tail, plan.decoder):
            if submodel is not None and submodel not in named:
                raise CutError(
                    f"plan '{plan.name}' names the submodel '{submodel}', expected one of"
                    f" {', '.join(named) or 'none'}"
                )
        tail = None if plan.tail is None else served_name(model, named[plan.tail], artifacts)
        plans.append(replace(plan, tail=tail))
    plain = json.loads(json.dumps(asdict(replace(table, plans=tuple(plans)))))
    coded = [plan for plan in plain["plans"] if plan["decoder"] is not None]
    others = [plan for plan in plain["plans"] if plan["decoder"] is None]
    for plan in others:
        del plan["decoder"]
    plain["plans"] = others or coded
    return {CUT_TABLE_ROLE: plain, **({CODED_PLANS_ROLE: coded} if others and coded else {})}
