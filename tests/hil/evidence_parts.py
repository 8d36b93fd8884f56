"""One file of evidence, for tests."""

from edgekit_host.evidence import Evidence, Figure, TestOutcome
from edgekit_runtime.agent.device_facts import DeviceFacts

FACTS = DeviceFacts(
    model="Pi 5",
    architecture="aarch64",
    os="Debian 12",
    kernel="6.6",
    python="3.11.2",
    runtime="0.1.0",
    engines={"onnxruntime": "1.24.4"},
    memory_bytes=1,
    free_bytes=2,
    clock="governor ondemand, at most kHz 2400000",
)
EVIDENCE = Evidence(
    bench="desk",
    kind="real",
    target="rpi5",
    date="2026-11-23T10:00:00+00:00",
    commit="a" * 40,
    is_dirty=False,
    device=FACTS,
    tests=(
        TestOutcome("test_a", "it works", "passed", "", 1.5),
        TestOutcome("test_b", "", "skipped", "why", 0),
    ),
    figures=(
        Figure(name="latency", value=1.5, unit="ms", method="median of 50", test="test_a"),
        Figure(name="energy", value=None, unit="mJ", method="no meter", test="test_a"),
    ),
)
