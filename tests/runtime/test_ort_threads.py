import os
from collections.abc import Iterator

import pytest

from edgekit_runtime.sessions.ort import OrtOptions, make_settings


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
