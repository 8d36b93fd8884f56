"""Measures candidates: extracts their submodels, runs them on samples, and times them on both machines.

Sizes and changes of answers are measured on the actual tensors and files. Times are those of complete runs of
head and tail, with compression and media codecs.
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
from edgekit_offload.partition.opened_model import Feeds, OpenedModel, open_model, run_session
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import (
    DECODER_SUFFIX,
    WEIGHTS_PATH,
    Part,
    SplitModels,
    split_model,
    whole_upload,
)
from edgekit_offload.planning.coding_costs import (
    COMPRESSION_PAYS,
    AnswerChange,
    TensorCoder,
    average_changes,
    compare_answers,
    find_probabilities,
)
from edgekit_offload.planning.costs import reply_bytes, request_bytes
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.leakage import LEAST_FOR_LIMIT, MAX_VALUES, Leakage, measure_leakage
from edgekit_offload.planning.leakage import MAX_SAMPLES as MAX_ATTACKED
from edgekit_offload.planning.plan_inputs import ExtractedPlan
from edgekit_offload.planning.result import Label, Refusal, SentTensor
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_models
from edgekit_offload.profiling.model_profile import describe_cause
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.codecs.compression import has_zstd
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.offload.measurement.job import TransferCoding
from edgekit_runtime.offload.offload_plan import LOCAL, Compression, OffloadPlan, PlanCosts
from edgekit_runtime.tensors import Array

_ZSTD: Final = " zstd"  # suffix of a plan's name: only its compression
_REPLY: Final = " reply"  # the same: only the decoding of the reply
_DIRECTIONS: Final[tuple[Literal["encode", "decode"], ...]] = ("encode", "decode")
_RUNS_S: Final = 0.5  # time of the model's runs for one attack, if time is limited
_LEAST_ATTACKED: Final = 40  # samples
_FEW_VALUES: Final = 256  # values of an input that an attack rebuilds, if time is limited


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSamples:
    """The results of a candidate on the samples.

    Attributes:
        tensors: The input tensors of the tail for the first sample.
        upload_bytes, download_bytes: The mean sizes of request and reply on the link in bytes.
        plain_bytes: The mean size of the request without compression in bytes.
        change: The change of the answers, or None if it is unknown (see `compare_answers`).
        reply: The outputs of the tail for the first sample.
    """

    tensors: Feeds
    upload_bytes: float
    plain_bytes: float
    download_bytes: float
    compression: Compression
    change: AnswerChange | None
    reply: Feeds


@dataclass(frozen=True, slots=True)
class _SplitPlan:
    """A candidate whose submodels ran on the samples."""

    plan: OffloadPlan
    split: SplitModels
    sent: SentSamples

    @property
    def name(self) -> str:
        return self.plan.name

    def compress(self, does: Literal["encode", "decode"]) -> RunnableGraph:
        inputs = dict(self.sent.tensors)
        return RunnableGraph(b"", inputs=inputs, coding=TransferCoding(tuple(inputs), does, {}, "zstd"))


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Times of the parts, by the name of the plan, and the speed of the device's processor."""

    device: Mapping[str, float]
    server: Mapping[str, float]
    usual_s: float | None


@dataclass(slots=True, kw_only=True)
class CutMeasurement:
    """Extracts and measures cuts and uploads. This class implements `Measure` for the planner.

    Attributes:
        feeds: The samples, one request each.
        seconds: The measuring time of each machine.
        options: The options of the model and its submodels that differ from the defaults of `OrtOptions`.
        classes: The outputs that are class scores. Outputs with class probabilities are detected and need not
            be listed.
        splits: A dict from the name of a plan to its submodels. Each measurement adds entries.
        usual_s: `MachineFacts.usual_s` of the device in the last measurement, or None if there was none.
    """

    model: OpenedModel
    feeds: Sequence[Feeds]
    device: Machine
    server: Machine
    seconds: float
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    classes: Collection[str] = ()
    splits: dict[str, SplitModels] = field(default_factory=dict)
    usual_s: float | None = None

    def __call__(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        """Return the result of each candidate, and of the whole model timed beside them."""
        try:
            return self._measure(uploads, cuts)
        except EdgekitError as cause:
            if not cuts:
                raise
            reason = f"It cannot be measured: {describe_cause(cause)}."
            refused = {cut.plan.name: Refusal(cut.plan.name, reason) for cut in cuts}
            return {**self._measure(uploads, ()), **refused}

    def _measure(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        extractions = [self._extract(*part) for part in self._list_parts(uploads, cuts)]
        plans = [extraction for extraction in extractions if isinstance(extraction, _SplitPlan)]
        self.splits |= {plan.name: plan.split for plan in plans}
        seconds = self._time(plans)
        self.usual_s = seconds.usual_s
        label: Label = "emulated" if "emulated" in (self.device.label, self.server.label) else "measured"
        local = OffloadPlan(LOCAL, PlanCosts(seconds.device[LOCAL], is_measured=True))
        return {
            **{extraction.name: extraction for extraction in extractions if isinstance(extraction, Refusal)},
            **{
                plan.name: ExtractedPlan(_with_costs(plan, seconds), label, plan.sent.change)
                for plan in plans
            },
            LOCAL: ExtractedPlan(local, self.device.label),
        }

    def _list_parts(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> list[tuple[OffloadPlan, Callable[[], SplitModels]]]:
        """Return each plan with the function that extracts it."""
        source: bytes | SourceModel = self.model.content
        with contextlib.suppress(CutError):  # then the model runs whole, and there are no cuts
            source = self.model.source
        parts: list[tuple[OffloadPlan, Callable[[], SplitModels]]] = []
        parts += [(upload.plan, partial(whole_upload, source, upload.coding)) for upload in uploads]
        parts += [
            (cut.plan, partial(split_model, source, cut.device_nodes, Coding(cut.cut.coding))) for cut in cuts
        ]
        return parts

    def _extract(self, plan: OffloadPlan, split: Callable[[], SplitModels]) -> _SplitPlan | Refusal:
        """Return a plan whose parts answer the samples, or why they do not."""
        try:
            parts = split()
            sent = self.send_samples(plan, parts)
        except Exception as cause:  # engines and codecs raise errors of their own
            return Refusal(plan.name, f"It cannot be extracted: {describe_cause(cause)}.")
        return _SplitPlan(plan, parts, sent)

    def _time(self, plans: Sequence[_SplitPlan]) -> _Seconds:
        """Return the times of all parts; a machine that is both device and server measures once."""
        heads: dict[str, RunnableGraph] = {}
        tails: dict[str, RunnableGraph] = {}
        for plan in plans:
            tails[plan.name] = self._tail(plan)
            if (head := self._head(plan)) is not None:
                heads[plan.name] = head
            if plan.sent.compression == "zstd":
                heads[plan.name + _ZSTD], tails[plan.name + _ZSTD] = map(plan.compress, _DIRECTIONS)
            if plan.split.decoder is not None:
                codes = {spec.name: plan.sent.reply[spec.name] for spec in plan.split.decoder.inputs}
                heads[plan.name + _REPLY] = RunnableGraph(
                    plan.split.decoder.content, self.options, inputs=codes
                )
        whole = RunnableGraph(self.model.content, self.options, inputs=dict(self.feeds[0]))
        device = [whole, *heads.values()]
        if self.device == self.server:
            timings = time_models(self.device, [*device, *tails.values()], seconds=self.seconds)
            device_timings, server_timings = timings[: len(device)], timings[len(device) :]
        else:
            device_timings = time_models(self.device, device, seconds=self.seconds)
            server_timings = time_models(self.server, [whole, *tails.values()], seconds=self.seconds)[1:]
        return _Seconds(
            dict(zip((LOCAL, *heads), (timing.seconds for timing in device_timings), strict=True)),
            dict(zip(tails, (timing.seconds for timing in server_timings), strict=True)),
            device_timings[0].usual_s,
        )

    def send_samples(self, plan: OffloadPlan, split: SplitModels) -> SentSamples:
        head = None if split.head is None else self._session(split.head)
        tail = self._session(split.tail)
        decoder = None if split.decoder is None else self._session(split.decoder)
        plain_bytes, packed_bytes, down_bytes, changes = [], [], [], []
        first: Feeds = {}
        reply: Feeds = {}
        may_pack = has_zstd() and not plan.media
        answers = self.model.answers(self.feeds)
        classes = {*self.classes, *find_probabilities(answers)}
        for feeds, expected in zip(self.feeds, answers, strict=True):
            tensors = dict(feeds) if head is None else {**feeds, **run_session(head, feeds)}
            coded = _Media(plan.media, {spec.name: tensors[spec.name] for spec in split.sent})
            first = first or coded.decoded
            plain_bytes.append(request_bytes(coded.files))
            packed_bytes.append(request_bytes(coded.files, "zstd") if may_pack else plain_bytes[-1])
            outputs = run_session(tail, coded.decoded)
            reply = reply or outputs
            down_bytes.append(reply_bytes(outputs))
            if decoder is not None:
                outputs = {**outputs, **run_session(decoder, outputs)}
            changes.append(compare_answers({**tensors, **outputs}, expected, classes))
        is_packed = sum(packed_bytes) < COMPRESSION_PAYS * sum(plain_bytes)
        return SentSamples(
            tensors=first,
            upload_bytes=statistics.fmean(packed_bytes if is_packed else plain_bytes),
            plain_bytes=statistics.fmean(plain_bytes),
            download_bytes=statistics.fmean(down_bytes),
            compression="zstd" if is_packed else "identity",
            change=average_changes(changes),
            reply=reply,
        )

    def _head(self, candidate: _SplitPlan) -> RunnableGraph | None:
        """Return the device's part of a candidate, or None if it sends its inputs as they are."""
        names = tuple(spec.name for spec in candidate.split.sent)
        coding = TransferCoding(names, "encode", candidate.plan.media, candidate.sent.compression)
        if candidate.split.head is not None:
            return self._graph(candidate.split.head, self.feeds[0], coding)
        if not coding.media and coding.compression == "identity":
            return None
        return RunnableGraph(b"", inputs=dict(self.feeds[0]), coding=coding)

    def _tail(self, candidate: _SplitPlan) -> RunnableGraph:
        names = tuple(spec.name for spec in candidate.split.sent)
        coding = TransferCoding(names, "decode", candidate.plan.media, candidate.sent.compression)
        return self._graph(candidate.split.tail, candidate.sent.tensors, coding)

    def _graph(self, part: Part, inputs: Feeds, coding: TransferCoding) -> RunnableGraph:
        weights = {WEIGHTS_PATH: self.model.content} if part.reads_weights else {}
        names = {*(spec.name for spec in part.inputs), *coding.tensors} & inputs.keys()
        own_inputs = {name: inputs[name] for name in sorted(names)}
        return RunnableGraph(part.content, self.options, weights, own_inputs, coding)

    def _session(self, part: Part) -> onnxruntime.InferenceSession:
        if not part.reads_weights:
            return open_model(part.content)
        content, settings = self.model.content, onnxruntime.SessionOptions()
        settings.add_external_initializers_from_files_in_memory(
            [WEIGHTS_PATH], [memoryview(content)], [len(content)]
        )
        return open_model(part.content, settings)


def _with_costs(candidate: _SplitPlan, seconds: _Seconds) -> OffloadPlan:
    name, plan, sent = candidate.name, candidate.plan, candidate.sent
    stem = (plan.tail or "").removesuffix(".tail")
    costs = PlanCosts(
        seconds.device.get(name, 0.0) + seconds.device.get(name + _REPLY, 0.0),
        seconds.server[name],
        sent.upload_bytes,
        sent.download_bytes,
        is_measured=True,
        plain_bytes=sent.plain_bytes if sent.compression == "zstd" else None,
        compress_s=seconds.device.get(name + _ZSTD, 0.0),
        decompress_s=seconds.server.get(name + _ZSTD, 0.0),
    )
    return replace(
        plan,
        costs=costs,
        compression=sent.compression,
        answers_changed=None if sent.change is None else sent.change.changed,
        decoder=None if candidate.split.decoder is None else f"{stem}{DECODER_SUFFIX}",
    )


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
        decoded = decode_media(
            self._codecs[name], self.files[name].tobytes(), dtype=tensor.dtype.name, channels=channels
        )
        return decoded[np.newaxis]


def leakage_of(
    model: OpenedModel, feeds: Sequence[Feeds], *, limit_s: float = math.inf, max_bytes: float = 1e9
) -> Callable[[Sequence[SentTensor]], Leakage | None]:
    """Return a function that measures how well an attacker can reconstruct an input from sent tensors.

    If the model has several inputs, the function returns the leakage of the input with the highest leakage.
    If the sent tensors exceed `max_bytes`, fewer samples are used, but at least `LEAST_FOR_LIMIT`. If the
    tensors of these samples still exceed `max_bytes`, the attacker gets a random selection of the values.

    Args:
        model: The ONNX model.
        feeds: The samples, one request each. The attacker knows most of them.
        limit_s: The total time, after which calls return None. With a limit, fewer samples are used for a
            slow model, which makes the attack weaker.
        max_bytes: The maximum size of the sent tensors of all samples in bytes.
    """
    spent_s = 0.0
    used, most_values = feeds, MAX_VALUES
    if math.isfinite(limit_s):
        most_values = _FEW_VALUES
        used = feeds[: max(int(_RUNS_S / model.run_seconds(feeds[0])), _LEAST_ATTACKED)]

    def measure(sent: Sequence[SentTensor]) -> Leakage | None:
        nonlocal spent_s
        if spent_s > limit_s:
            return None
        began_s = time.monotonic()
        inputs, tensors = _record_attacked(model, used[:MAX_ATTACKED], sent, most_values, max_bytes)
        varied = [rows for rows in inputs if rows.dtype.kind in "biuf" and (rows != rows[0]).any()]
        leakages = [measure_leakage(rows, tensors, most_values=most_values) for rows in varied or inputs[:1]]
        spent_s += time.monotonic() - began_s
        return max(leakages, key=lambda leakage: leakage.lower_bound_db)

    return measure


def _record_attacked(
    model: OpenedModel,
    feeds: Sequence[Feeds],
    sent: Sequence[SentTensor],
    most_values: int,
    max_bytes: float,
) -> tuple[list[Array], list[Array]]:
    """Return values of each input, and of each tensor as the server decodes it: [samples, values].

    `feeds`: samples; only the first ones are used if their tensors would be too large.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    names = [tensor.name for tensor in sent]
    del proto.graph.output[:]  # the attacker needs nothing behind the sent tensors
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_model(proto.SerializeToString())
    draws = np.random.default_rng(0)
    rebuilt = {name: _draw(draws, value.size, most_values) for name, value in feeds[0].items()}
    first = dict(zip(names, session.run(names, dict(feeds[0])), strict=True))
    coders = {tensor.name: TensorCoder(tensor.coding) for tensor in sent}
    sample_bytes = sum(value.nbytes for value in first.values())
    used = feeds[: max(int(max_bytes / sample_bytes), LEAST_FOR_LIMIT)]
    share = max_bytes / (sample_bytes * len(used))
    drawn = {name: _draw(draws, value.size, int(value.size * share)) for name, value in first.items()}
    inputs: dict[str, list[Array]] = {name: [] for name in rebuilt}
    tensors: dict[str, list[Array]] = {name: [] for name in names}
    for sample in used:
        for name, indices in rebuilt.items():
            inputs[name].append(sample[name].reshape(-1)[indices])
        for name, value in zip(names, session.run(names, dict(sample)), strict=True):
            tensors[name].append(coders[name].restore(value).reshape(-1)[drawn[name]])
    return [np.stack(rows) for rows in inputs.values()], [np.stack(rows) for rows in tensors.values()]


def _draw(draws: np.random.Generator, size: int, count: int) -> NDArray[np.int64]:
    """Return the sorted indices of `count` random values of a tensor, at least one; all if it is smaller."""
    return np.arange(size) if count >= size else np.sort(draws.choice(size, max(count, 1), replace=False))
