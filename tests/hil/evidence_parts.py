"""One file of evidence, for tests."""

from edgekit_host.evidence import DeviceFacts, Evidence, Figure, TestOutcome

FACTS = DeviceFacts(
    *("Pi 5", "aarch64", "Debian 12", "6.6", "3.11.2", "0.1.0", {"onnxruntime": "1.24.4"}, 1, 2),
    clock="governor ondemand, at most kHz 2400000",
)
EVIDENCE = Evidence(
    "desk",
    "real",
    "rpi5",
    "2026-11-23T10:00:00+00:00",
    "a" * 40,
    False,
    FACTS,
    (TestOutcome("test_a", "it works", "passed", "", 1.5), TestOutcome("test_b", "", "skipped", "why", 0)),
    (
        Figure("latency", 1.5, "ms", "median of 50", "test_a"),
        Figure("energy", None, "mJ", "no meter", "test_a"),
    ),
)
