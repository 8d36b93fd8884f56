import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession, make_settings

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.fixture
def one_processor() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a machine with one processor")
def test_process_that_may_use_one_processor_gets_one_thread(one_processor: None) -> None:
    assert make_settings(OrtOptions()).intra_op_num_threads == 1


def test_stated_number_of_threads_is_kept(one_processor: None) -> None:
    assert make_settings(OrtOptions(threads=3)).intra_op_num_threads == 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != os.cpu_count(), reason="bound to some processors")
def test_process_that_may_use_all_processors_leaves_the_number_to_onnxruntime() -> None:
    assert make_settings(OrtOptions()).intra_op_num_threads == 0


def test_interrupted_session_stays_so_after_its_runs_are_cancelled() -> None:
    session = OrtSession((TINY / "italy_power_mlp.onnx").read_bytes())
    feeds = {spec.name: np.zeros((1, *spec.shape[1:]), np.float32) for spec in session.inputs}  # type: ignore[arg-type]
    session.cancel_runs()
    assert session.run(feeds)
    session.interrupt()
    session.cancel_runs()
    with pytest.raises(BackendError):
        session.run(feeds)
