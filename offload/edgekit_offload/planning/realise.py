"""Measures real ways: extracts their submodels, runs them on the samples, and times them on both machines.

Sizes and changes of the answers come from real tensors and files, times from whole runs of head and tail.
Compression and media codecs are timed with them. This module chooses nothing.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import (
    DECODER_SUFFIX,
    WEIGHTS_PATH,
    Part,
    SplitModels,
    split_model,
    whole_upload,
)
from edgekit_offload.planning.codings import (
    COMPRESSION_PAYS,
    AnswerChange,
    Feeds,
    TensorCodec,
    average_changes,
    compare_answers,
    find_probabilities,
    open_model,
    run_seconds,
)
from edgekit_offload.planning.costs import reply_bytes, request_bytes
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.leakage import LEAST_FOR_LIMIT, MAX_VALUES, Leakage, measure_leakage
from edgekit_offload.planning.leakage import MAX_SAMPLES as MAX_ATTACKED
from edgekit_offload.planning.planner import Realised
from edgekit_offload.planning.result import Label, Refusal, SentTensor
from edgekit_offload.planning.ways import UploadWay
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_models
from edgekit_offload.profiling.model_profile import describe_cause
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.codecs.compression import has_zstd
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.offload.cut_table import LOCAL, Compression, OffloadPlan, PlanCosts
from edgekit_runtime.offload.measurement.job import TransferCoding
from edgekit_runtime.tensors import Array

_ZSTD: Final = " zstd"  # suffix of a plan's name: only its compression
_REPLY: Final = " reply"  # the same: only the decoding of the reply
_DIRECTIONS: Final[tuple[Literal["encode", "decode"], ...]] = ("encode", "decode")
_RUNS_S: Final = 0.5  # time of the model's runs for one attack, if time is limited
_LEAST_ATTACKED: Final = 40  # samples
_ATTACK_BYTES: Final = 1e9  # bytes of sent tensors of all samples of an attack
_FEW_VALUES: Final = 256  # values of an input that an attack rebuilds, if time is limited


@dataclass(frozen=True, slots=True)
class SentSamples:
    """Results of a way on the samples.

    Attributes:
        tensors: tensors of the first sample, as the tail takes them.
        upload_bytes, download_bytes: bytes of request and reply on the link, means over the samples.
        plain_bytes: bytes of the upload without compression.
        compression: compression of the request.
        change: change of the answers; None if unknown, see `compare_answers`.
        reply: outputs of the tail for the first sample.
    """

    tensors: Feeds
    upload_bytes: float
    plain_bytes: float
    download_bytes: float
    compression: Compression
    change: AnswerChange | None
    reply: Feeds


@dataclass(frozen=True, slots=True)
class _Extracted:
    """A way that works on the samples."""

    plan: OffloadPlan
    split: SplitModels
    sent: SentSamples

    def compress(self, does: Literal["encode", "decode"]) -> RunnableGraph:
        """Return only the compression of the sent tensors."""
        inputs = dict(self.sent.tensors)
        return RunnableGraph(b"", inputs=inputs, coding=TransferCoding(tuple(inputs), does, {}, "zstd"))


@dataclass(slots=True)
class MeasuredCuts:
    """Extracts cuts and uploads, and measures them; a `Realise` of the planner.

    Attributes:
        content: the ONNX model.
        feeds: samples, one request each.
        device, server: machines to measure on.
        seconds: time that each machine measures.
        options: options of the sessions that run model and parts: `OrtOptions` that differ from their
            defaults.
        classes: outputs that are known to hold scores of classes; probabilities are found without that.
        splits: name of the plan -> its submodels, after the call.
        usual_s: speed of the device's processor at the measurement, after the call.
    """

    content: bytes
    feeds: Sequence[Feeds]
    device: Machine
    server: Machine
    seconds: float
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    classes: Collection[str] = ()
    splits: dict[str, SplitModels] = field(default_factory=dict)
    usual_s: float | None = None

    def __call__(
        self, uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, Realised | Refusal]:
        """Return the result of each way, and of the whole model timed beside them."""
        try:
            return self._measure(uploads, cuts)
        except EdgekitError as cause:
            if not cuts:
                raise
            reason = f"It cannot be measured: {describe_cause(cause)}."
            refused = {one.plan.name: Refusal(one.plan.name, reason) for one in cuts}
            return {**self._measure(uploads, ()), **refused}

    def _measure(
        self, uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, Realised | Refusal]:
        results: dict[str, Realised | Refusal] = {}
        extracted = self._extract(uploads, cuts, results)
        self.splits |= {one.plan.name: one.split for one in extracted}
        whole = RunnableGraph(self.content, self.options, inputs=dict(self.feeds[0]))
        heads = {one.plan.name: self._head(one) for one in extracted}
        tails: dict[str, RunnableGraph] = {one.plan.name: self._tail(one) for one in extracted}
        for one in extracted:
            if one.sent.compression == "zstd":
                heads[one.plan.name + _ZSTD], tails[one.plan.name + _ZSTD] = map(one.compress, _DIRECTIONS)
            if one.split.decoder is not None:
                taken = {spec.name: one.sent.reply[spec.name] for spec in one.split.decoder.inputs}
                heads[one.plan.name + _REPLY] = RunnableGraph(
                    one.split.decoder.content, self.options, inputs=taken
                )
        shown = {name: one for name, one in heads.items() if one}
        device_s, self.usual_s = _time(self.device, whole, shown, self.seconds)
        server_s, _ = _time(self.server, whole, tails, self.seconds)
        label: Label = "emulated" if "emulated" in (self.device.label, self.server.label) else "measured"
        for one in extracted:
            found = one.sent
            costs = PlanCosts(
                device_s.get(one.plan.name, 0.0) + device_s.get(one.plan.name + _REPLY, 0.0),
                server_s[one.plan.name],
                found.upload_bytes,
                found.download_bytes,
                is_measured=True,
                plain_bytes=found.plain_bytes if found.compression == "zstd" else None,
                compress_s=device_s.get(one.plan.name + _ZSTD, 0.0),
                decompress_s=server_s.get(one.plan.name + _ZSTD, 0.0),
            )
            changed = None if found.change is None else found.change.changed
            stem = (one.plan.tail or "").removesuffix(".tail")
            plan = replace(
                one.plan,
                costs=costs,
                compression=found.compression,
                answers_changed=changed,
                decoder=None if one.split.decoder is None else f"{stem}{DECODER_SUFFIX}",
            )
            results[plan.name] = Realised(plan, label, found.change)
        local = PlanCosts(device_s[LOCAL], is_measured=True)
        results[LOCAL] = Realised(OffloadPlan(LOCAL, local), self.device.label)
        return results

    def _extract(
        self,
        uploads: Sequence[UploadWay],
        cuts: Sequence[CutCandidate],
        results: dict[str, Realised | Refusal],
    ) -> list[_Extracted]:
        """Return the ways that answer the samples; add refusals of the others to the results."""
        source: bytes | SourceModel = self.content
        with contextlib.suppress(CutError):  # then the model runs whole, and there are no cuts
            source = SourceModel(self.content)
        parts: list[tuple[OffloadPlan, Callable[[], SplitModels]]] = []
        parts += [(one.plan, partial(whole_upload, source, one.coding)) for one in uploads]
        parts += [
            (one.plan, partial(split_model, source, one.device_nodes, Coding(_kind(one)))) for one in cuts
        ]
        wanted = self.answer_samples()
        found = [self._try_one(plan, split, wanted) for plan, split in parts]
        results |= {one.name: one for one in found if isinstance(one, Refusal)}
        return [one for one in found if isinstance(one, _Extracted)]

    def _try_one(
        self, plan: OffloadPlan, split: Callable[[], SplitModels], wanted: Sequence[Feeds]
    ) -> _Extracted | Refusal:
        try:
            parts = split()
            sent = self.send_samples(plan, parts, wanted)
        except Exception as cause:  # engines and codecs raise errors of their own
            return Refusal(plan.name, f"It cannot be extracted: {describe_cause(cause)}.")
        return _Extracted(plan, parts, sent)

    def answer_samples(self) -> list[Feeds]:
        """Return the outputs of the whole model for each sample."""
        session = open_model(self.content)
        return [_run(session, one) for one in self.feeds]

    def send_samples(self, plan: OffloadPlan, split: SplitModels, wanted: Sequence[Feeds]) -> SentSamples:
        """Run head and tail on the samples."""
        head = None if split.head is None else self._session(split.head)
        tail = self._session(split.tail)
        decoder = None if split.decoder is None else self._session(split.decoder)
        plain_bytes, packed_bytes, down_bytes, changes = [], [], [], []
        first: Feeds = {}
        reply: Feeds = {}
        may_pack = has_zstd() and not plan.media
        classes = {*self.classes, *find_probabilities(wanted)}
        for feeds, expected in zip(self.feeds, wanted, strict=True):
            made = dict(feeds) if head is None else {**feeds, **_run(head, feeds)}
            tensors = {spec.name: made[spec.name] for spec in split.sent}
            coded = _Media(plan.media, tensors)
            first = first or coded.decoded
            plain_bytes.append(request_bytes(coded.files))
            packed_bytes.append(request_bytes(coded.files, "zstd") if may_pack else plain_bytes[-1])
            outputs = _run(tail, coded.decoded)
            reply = reply or outputs
            down_bytes.append(reply_bytes(outputs))
            if decoder is not None:
                outputs = {**outputs, **_run(decoder, outputs)}
            changes.append(compare_answers({**made, **outputs}, expected, classes))
        is_packed = sum(packed_bytes) < COMPRESSION_PAYS * sum(plain_bytes)
        return SentSamples(
            first,
            statistics.fmean(packed_bytes if is_packed else plain_bytes),
            statistics.fmean(plain_bytes),
            statistics.fmean(down_bytes),
            "zstd" if is_packed else "identity",
            average_changes(changes),
            reply,
        )

    def _head(self, way: _Extracted) -> RunnableGraph | None:
        """Return the device's part of a way, or None if it sends its inputs as they are."""
        names = tuple(spec.name for spec in way.split.sent)
        coding = TransferCoding(names, "encode", way.plan.media, way.sent.compression)
        if way.split.head is not None:
            return self._graph(way.split.head, self.feeds[0], coding)
        if not coding.media and coding.compression == "identity":
            return None
        return RunnableGraph(b"", inputs=dict(self.feeds[0]), coding=coding)

    def _tail(self, way: _Extracted) -> RunnableGraph:
        names = tuple(spec.name for spec in way.split.sent)
        coding = TransferCoding(names, "decode", way.plan.media, way.sent.compression)
        return self._graph(way.split.tail, way.sent.tensors, coding)

    def _graph(self, part: Part, inputs: Feeds, coding: TransferCoding) -> RunnableGraph:
        weights = {WEIGHTS_PATH: self.content} if part.reads_weights else {}
        names = {*(one.name for one in part.inputs), *coding.tensors} & inputs.keys()
        taken = {name: inputs[name] for name in sorted(names)}
        return RunnableGraph(part.content, self.options, weights, taken, coding)

    def _session(self, part: Part) -> onnxruntime.InferenceSession:
        if not part.reads_weights:
            return open_model(part.content)
        settings = onnxruntime.SessionOptions()
        settings.add_external_initializers_from_files_in_memory(
            [WEIGHTS_PATH], [memoryview(self.content)], [len(self.content)]
        )
        return open_model(part.content, settings)


class _Media:
    """The tensors of one request, some of them as media files.

    Attributes:
        files: the files that are sent.
        decoded: the tensors that the server decodes from them.

    Raises:
        DataError: a tensor cannot become such a file.
        BackendError: the library is not installed.
    """

    def __init__(self, media: Mapping[str, str], tensors: Feeds) -> None:
        self._codecs = {name: MediaCodec.parse(codec) for name, codec in media.items()}
        self._tensors = tensors
        self.files = {**tensors, **{name: self._encode(name) for name in media}}
        self.decoded = {**tensors, **{name: self._decode(name) for name in media}}

    def _encode(self, name: str) -> Array:
        if len(self._tensors[name]) != 1:
            raise CutError(f"a media file carries one sample, '{name}' has {len(self._tensors[name])}")
        return np.frombuffer(encode_media(self._codecs[name], self._tensors[name][0]), np.uint8)

    def _decode(self, name: str) -> Array:
        tensor = self._tensors[name]
        channels = 1 if tensor.shape[-1] == 1 else 3
        found = decode_media(
            self._codecs[name], self.files[name].tobytes(), dtype=tensor.dtype.name, channels=channels
        )
        return found[np.newaxis]


def _time(
    machine: Machine, whole: RunnableGraph, parts: Mapping[str, RunnableGraph], seconds: float
) -> tuple[dict[str, float], float | None]:
    """Return the times of parts in seconds, the whole model's under `LOCAL`, and the processor's speed."""
    timings = time_models(machine, [whole, *parts.values()], seconds=seconds)
    return dict(zip((LOCAL, *parts), (one.seconds for one in timings), strict=True)), timings[0].usual_s


def leakage_of(
    content: bytes, feeds: Sequence[Feeds], *, limit_s: float = math.inf
) -> Callable[[Sequence[SentTensor]], Leakage | None]:
    """Return a function that measures how well an attacker rebuilds an input from sent tensors.

    Of several inputs, the one that leaks most counts. If the sent tensors of all samples take more than 1 GB,
    fewer samples are used, but not fewer than `LEAST_FOR_LIMIT`. If these take more, too, the attacker gets a
    random part of the values of each tensor.

    Args:
        content: the ONNX model.
        feeds: samples, one request each; the attacker knows most of them.
        limit_s: time of all calls together; after it, calls return None. With a limit the attacker also
            knows fewer samples if the model is slow, so the lower bound is lower.
    """
    spent_s = 0.0
    used, most_values = feeds, MAX_VALUES
    if math.isfinite(limit_s):
        most_values = _FEW_VALUES
        used = feeds[: max(int(_RUNS_S / run_seconds(content, feeds[0])), _LEAST_ATTACKED)]

    def measure(sent: Sequence[SentTensor]) -> Leakage | None:
        nonlocal spent_s
        if spent_s > limit_s:
            return None
        began_s = time.monotonic()
        inputs, tensors = _record_attacked(content, used[:MAX_ATTACKED], sent, most_values)
        varied = [one for one in inputs if one.dtype.kind in "biuf" and (one != one[0]).any()]
        found = [measure_leakage(one, tensors, most_values=most_values) for one in varied or inputs[:1]]
        spent_s += time.monotonic() - began_s
        return max(found, key=lambda one: one.lower_bound_db)

    return measure


def _record_attacked(
    content: bytes, feeds: Sequence[Feeds], sent: Sequence[SentTensor], most_values: int
) -> tuple[list[Array], list[Array]]:
    """Return values of each input, and of each tensor as the server decodes it: [samples, values].

    Args:
        content: the ONNX model.
        feeds: samples; only the first ones are used if their tensors would be too large.
        sent: the tensors that the attacker sees.
        most_values: limit on the values of an input.
    """
    proto = onnx.load_from_string(content)
    names = [one.name for one in sent]
    del proto.graph.output[:]  # the attacker needs nothing behind the sent tensors
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_model(proto.SerializeToString())
    draws = np.random.default_rng(0)
    wanted = {name: _draw(draws, one.size, most_values) for name, one in feeds[0].items()}
    first = dict(zip(names, session.run(names, dict(feeds[0])), strict=True))
    codecs = {one.name: TensorCodec(one.coding) for one in sent}
    sample_bytes = sum(one.nbytes for one in first.values())
    taken = feeds[: max(int(_ATTACK_BYTES / sample_bytes), LEAST_FOR_LIMIT)]
    share = _ATTACK_BYTES / (sample_bytes * len(taken))
    seen = {name: _draw(draws, one.size, int(one.size * share)) for name, one in first.items()}
    inputs: dict[str, list[Array]] = {name: [] for name in wanted}
    tensors: dict[str, list[Array]] = {name: [] for name in names}
    for feed in taken:
        for name, values in wanted.items():
            inputs[name].append(feed[name].reshape(-1)[values])
        for name, made in zip(names, session.run(names, dict(feed)), strict=True):
            tensors[name].append(codecs[name].restore(made).reshape(-1)[seen[name]])
    return [np.stack(one) for one in inputs.values()], [np.stack(one) for one in tensors.values()]


def _draw(draws: np.random.Generator, size: int, count: int) -> NDArray[np.int64]:
    """Return the sorted places of `count` random values of a tensor, at least one; all if it is smaller."""
    return np.arange(size) if count >= size else np.sort(draws.choice(size, max(count, 1), replace=False))


def _kind(cut: CutCandidate) -> Literal["raw", "int8", "int4"]:
    coding = cut.found.coding
    if coding == "int8":
        return "int8"
    return "int4" if coding == "int4" else "raw"


def _run(session: onnxruntime.InferenceSession, feeds: Feeds) -> dict[str, Array]:
    names = [one.name for one in session.get_outputs()]
    taken = {one.name: feeds[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))
