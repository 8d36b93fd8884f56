"""What is left of a version once another one has taken its place."""

import contextlib
import gc
from collections import Counter
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Running, make_config, running
from tests.service.wiring_parts import ask_many, load, served_version, statistics, write
from tests.waiting import wait_for

from edgekit_runtime.client import responses
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions

_SWAPS = 10
# Wide, so that few calls decide: what a swap leaves behind does not depend on how many there were.
_GATES = Gates(min_agreement=0.1, max_p50_ratio=0, max_p99_ratio=0, max_extra_errors=0.9, min_samples=20)
_SHADOW = ShadowOptions(share=1.0, quiet_s=0.0005, max_wait_s=10)


def count_ours() -> Counter[str]:
    """Return how many objects of each of our classes there are, garbage that was not collected among them."""
    responses._decode_cached.cache_clear()  # of the client that asks: bounded
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter(
        {
            kind.__qualname__: count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith("edgekit_runtime.")
        }
    )


def grown_since(before: Counter[str]) -> dict[str, int]:
    """Return of which of our classes there are more, by as many as half of the swaps."""
    more = count_ours() - before
    return {name: count for name, count in more.items() if count >= _SWAPS // 2}


def swap_often(service: Running, maker: PackageMaker, folder: Path, first: int, count: int) -> None:
    """Swap to version after version, with requests between, and leave the last two packages there."""
    for number in range(first, first + count):
        write(maker, folder, f"{number}.0.0")
        (folder / f"linear-{number - 2}.0.0.edgepkg").unlink(missing_ok=True)
        assert load(service).status == 200
        wait_for(lambda: ask_for_version(service) == f"{number}.0.0")  # noqa: B023  # waits here
        statistics(service)


def ask_for_version(service: Running) -> str:
    list(ask_many(service, 15, pause_s=0.002))  # a shadow runs in pauses
    return served_version(service)


@pytest.mark.parametrize(
    "options",
    [
        ModelOptions(swap="availability"),
        pytest.param(ModelOptions(swap="resource"), marks=pytest.mark.long),
        ModelOptions(
            swap="availability", cache=True, scheduling=SchedulingLimits(max_batch=4, max_delay_s=0.001)
        ),
        ModelOptions(swap="availability", governor=GovernorOptions()),
        ModelOptions(rollout="canary", canary=CanaryOptions(share=0.5, compared_share=1), gates=_GATES),
        pytest.param(ModelOptions(rollout="shadow", gates=_GATES, shadow=_SHADOW), marks=pytest.mark.long),
    ],
    ids=["availability", "resource", "batches and cache", "governor", "canary", "shadow"],
)
def test_swaps_leave_nothing_of_ours_behind(
    maker: PackageMaker, tmp_path: Path, options: ModelOptions
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    write(maker, packages, "1.0.0")
    config = make_config(tmp_path, models={"linear": options})
    with running(config, PackageFiles([packages], maker.trust)) as service:
        swap_often(service, maker, packages, 2, 5)  # what is made once and stays
        gc.collect()
        gc.disable()  # what waits for the collector is memory too: hundreds of swaps pass before it looks
        try:
            before = count_ours()
            swap_often(service, maker, packages, 7, _SWAPS)
            with contextlib.suppress(AssertionError):  # the last version may still be on its way out
                wait_for(lambda: not grown_since(before), limit_s=60)
            more = grown_since(before)
        finally:
            gc.enable()
        assert more == {}
