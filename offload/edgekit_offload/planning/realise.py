"""Cuts as they are: extracted as real submodels, run on the samples, and timed on both machines in turn.

Sizes and changes of the answers come from real tensors, times from whole runs of head and tail. It chooses
nothing.
"""

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
import onnx
import onnxruntime

from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import WEIGHTS_PATH, Part, SplitModels, split_model, whole_upload
from edgekit_offload.planning.codings import Feeds, compressed_bytes, median_s, open_model, restore
from edgekit_offload.planning.costs import MESSAGE_BYTES, TENSOR_BYTES
from edgekit_offload.planning.leakage import MAX_DB, measure_leakage
from edgekit_offload.planning.planner import CutCandidate, Realised
from edgekit_offload.planning.result import Label, Refusal, SentTensor
from edgekit_offload.planning.ways import RAW_WAY, UploadWay
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_models
from edgekit_runtime.errors import CutError
from edgekit_runtime.remote.cut_table import LOCAL, Compression, OffloadPlan, PlanCosts
from edgekit_runtime.tensors import Array

_LEAST_CLASSES: Final = 2


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the samples gave for a cut.

    Attributes:
        tensors: of the first sample.
        upload_bytes, download_bytes: bodies, the mean of the samples.
        compression: of the request.
        compress_s: median time of compressing a request, on this machine.
        changed: share of the samples whose best class is another one; None for outputs that are no classes.
    """

    tensors: Feeds
    upload_bytes: float
    download_bytes: float
    compression: Compression
    compress_s: float
    changed: float | None


@dataclass(slots=True)
class MeasuredCuts:
    """Extracts cuts and measures them; a `Realise` of the planner.

    Attributes:
        content: the ONNX model.
        feeds: samples, one request each.
        device, server: machines to measure on.
        seconds: how long each machine measures.
        splits: name of the plan -> its submodels, once it was called.
    """

    content: bytes
    feeds: Sequence[Feeds]
    device: Machine
    server: Machine
    seconds: float
    splits: dict[str, SplitModels] = field(default_factory=dict)

    def __call__(
        self, uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, Realised | Refusal]:
        """Return what came of each cut, and the whole model timed beside them."""
        results: dict[str, Realised | Refusal] = {}
        sent: dict[str, _Sent] = {}
        wanted = [self._session(Part(self.content, (), (), False)).run(None, dict(one)) for one in self.feeds]
        source = SourceModel(self.content) if cuts else None
        for cut in cuts:
            came = self._extract(cut, source, wanted)
            if isinstance(came, Refusal):
                results[cut.plan.name] = came
            else:
                self.splits[cut.plan.name], sent[cut.plan.name] = came
        kept = [cut for cut in cuts if cut.plan.name in sent]
        heads = [self._graph(self.splits[cut.plan.name].head, self.feeds[0]) for cut in kept]
        tails = [self._graph(self.splits[cut.plan.name].tail, sent[cut.plan.name].tensors) for cut in kept]
        whole = RunnableGraph(self.content, inputs=dict(self.feeds[0]))
        on_device = time_models(self.device, [whole, *heads], seconds=self.seconds)
        on_server = time_models(self.server, [whole, *tails], seconds=self.seconds)
        session = open_model(self.content)
        here_s = median_s(lambda: session.run(None, dict(self.feeds[0])))
        slowdown = on_device[0].seconds / here_s
        label: Label = "emulated" if "emulated" in (self.device.label, self.server.label) else "measured"
        for number, cut in enumerate(kept):
            found = sent[cut.plan.name]
            costs = PlanCosts(
                on_device[number + 1].seconds + found.compress_s * slowdown,
                on_server[number + 1].seconds + found.compress_s * on_server[0].seconds / here_s,
                found.upload_bytes,
                found.download_bytes,
                is_measured=True,
            )
            change = None if found.changed is None else -found.changed
            plan = replace(cut.plan, costs=costs, compression=found.compression, accuracy_change=change)
            results[cut.plan.name] = Realised(plan, label)
        local = PlanCosts(on_device[0].seconds, is_measured=True)
        results[LOCAL] = Realised(OffloadPlan(LOCAL, local), self.device.label)
        with contextlib.suppress(CutError):  # then the upload is shown, and not packaged
            if any(upload.plan.name == RAW_WAY for upload in uploads):
                self.splits[RAW_WAY] = whole_upload(self.content)
        for upload in uploads:  # the whole model runs as it is; coding of the input stays modelled
            server_s = upload.plan.costs.server_s - upload.whole_s + on_server[0].seconds
            costs = replace(upload.plan.costs, server_s=max(server_s, 0.0))
            results[upload.plan.name] = Realised(replace(upload.plan, costs=costs), "modelled")
        return results

    def _extract(
        self, cut: CutCandidate, source: SourceModel | None, wanted: Sequence[Sequence[Array]]
    ) -> tuple[SplitModels, _Sent] | Refusal:
        try:
            split = split_model(source or self.content, cut.device_nodes, Coding(_kind(cut)))
            return split, self._send(split, wanted)
        except CutError as cause:
            return Refusal(cut.plan.name, f"It cannot be extracted: {cause}.")

    def _send(self, split: SplitModels, wanted: Sequence[Sequence[Array]]) -> _Sent:
        """Run head and tail on the samples."""
        head = None if split.head is None else self._session(split.head)
        tail = self._session(split.tail)
        plain_bytes, packed_bytes, down_bytes, changed = [], [], [], []
        first: Feeds = {}
        for feeds, expected in zip(self.feeds, wanted, strict=True):
            made = dict(feeds) if head is None else _run(head, feeds)
            tensors = {spec.name: made[spec.name] for spec in split.sent}
            first = first or tensors
            body = _join(tensors)
            plain_bytes.append(body.nbytes)
            packed_bytes.append(compressed_bytes(body))
            outputs = _run(tail, tensors)
            down_bytes.append(sum(one.nbytes for one in outputs.values()))
            answer = next(iter(outputs.values()))
            changed.append(_differs(answer, expected[0]))
        body = _join(first)
        is_packed = sum(packed_bytes) < sum(plain_bytes)
        known = [one for one in changed if one is not None]
        return _Sent(
            first,
            statistics.fmean(packed_bytes if is_packed else plain_bytes)
            + MESSAGE_BYTES
            + TENSOR_BYTES * len(first),
            statistics.fmean(down_bytes) + MESSAGE_BYTES + TENSOR_BYTES * len(split.tail.outputs),
            "zstd" if is_packed else "identity",
            median_s(lambda: compressed_bytes(body)) if is_packed else 0.0,
            statistics.fmean(known) if known else None,
        )

    def _graph(self, part: Part | None, inputs: Feeds) -> RunnableGraph:
        if part is None:
            raise CutError("a cut without a head is an upload")
        weights = {WEIGHTS_PATH: self.content} if part.reads_weights else {}
        return RunnableGraph(part.content, weights=weights, inputs=dict(inputs))

    def _session(self, part: Part) -> onnxruntime.InferenceSession:
        if not part.reads_weights:
            return open_model(part.content)
        settings = onnxruntime.SessionOptions()
        settings.add_external_initializers_from_files_in_memory(
            [WEIGHTS_PATH], [memoryview(self.content)], [len(self.content)]
        )
        return open_model(part.content, settings)


def leakage_of(content: bytes, feeds: Sequence[Feeds]) -> Callable[[Sequence[SentTensor]], float]:
    """Return what measures how well an attacker rebuilds the first input from sent tensors, in dB.

    Args:
        content: the ONNX model.
        feeds: samples, one request each; the attacker knows most of them.
    """

    def measure(sent: Sequence[SentTensor]) -> float:
        if {one.name for one in sent} & set(feeds[0]):  # the input itself, at most in another coding
            return MAX_DB
        proto = onnx.load_from_string(content)
        known = {one.name for one in proto.graph.output}
        names = [one.name for one in sent]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
        session = open_model(proto.SerializeToString())
        rows = [session.run(names, dict(one)) for one in feeds]
        tensors = [
            np.concatenate([restore(row[place], one.coding) for row in rows])
            for place, one in enumerate(sent)
        ]
        first = next(iter(feeds[0]))
        return measure_leakage(np.concatenate([one[first] for one in feeds]), tensors).lower_bound_db

    return measure


def _kind(cut: CutCandidate) -> Literal["raw", "int8", "int4"]:
    coding = cut.found.coding
    if coding == "int8":
        return "int8"
    return "int4" if coding == "int4" else "raw"


def _run(session: onnxruntime.InferenceSession, feeds: Feeds) -> dict[str, Array]:
    names = [one.name for one in session.get_outputs()]
    taken = {one.name: feeds[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


def _join(tensors: Feeds) -> Array:
    return np.frombuffer(b"".join(np.ascontiguousarray(one).tobytes() for one in tensors.values()), np.uint8)


def _differs(answer: Array, expected: Array) -> float | None:
    """Return the share of rows whose best class is another one; None where there are no classes."""
    if answer.shape != expected.shape or answer.ndim < _LEAST_CLASSES or answer.shape[-1] < _LEAST_CLASSES:
        return None
    return float((answer.argmax(axis=-1) != expected.argmax(axis=-1)).mean())
