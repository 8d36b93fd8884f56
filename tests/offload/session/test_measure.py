"""Jobs as a device reads them: what is malformed is refused before anything is allocated or run."""

import io
import json
from typing import Any

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import CutError, DataError
from edgekit_runtime.offload.measurement.job import Job, JobGraph, JobInput, TransferCoding, read_job
from edgekit_runtime.offload.measurement.job_runner import measure


def stream(blobs: bytes = b"", **changes: Any) -> io.BytesIO:
    job = {"kind": "time", "graphs": [{"model": 0}], "blob_bytes": [4], **changes}
    return io.BytesIO(json.dumps(job).encode() + b"\n" + blobs)


def test_job_is_read_with_its_blobs() -> None:
    job, blobs = read_job(stream(b"abcd"))
    assert job.graphs[0].model == 0
    assert bytes(blobs[0]) == b"abcd"


@cases(
    ("given", "message"),
    [
        (stream(b"abc"), "ended before the last blob"),
        (stream(b"abcd", graphs=[{"model": 1}]), "names blob 1"),
        (stream(b"abcd", graphs=[]), "0 graphs"),
        (stream(blob_bytes=[1 << 40]), "expected at most"),
        (stream(b"abcd", graphs=[{"model": None}]), "without a model"),
        (stream(kind="serve"), "one of profile, time"),
        (io.BytesIO(b"GET / HTTP/1.1\r\n"), "no JSON"),
    ],
)
def test_malformed_job_is_refused(given: io.BytesIO, message: str) -> None:
    with pytest.raises(CutError, match=message):
        read_job(given)


def test_coding_runs_with_the_half() -> None:
    """What cannot be coded fails, so the coding did run."""
    inputs = (JobInput("x", "float32", (1, 1), 0),)
    graph = JobGraph(None, inputs=inputs, coding=TransferCoding(("x",), "encode", {"x": "jpeg:90"}))
    with pytest.raises(DataError, match="expected uint8"):
        measure(Job(kind="time", graphs=(graph,), blob_bytes=(4,), seconds=0.1), [memoryview(bytes(4))])


def test_tensor_that_the_graph_has_not_is_refused() -> None:
    graph = JobGraph(None, coding=TransferCoding(("x",), "encode"))
    with pytest.raises(CutError, match="no tensor 'x'"):
        measure(Job(kind="time", graphs=(graph,), blob_bytes=(), seconds=0.1), [])
