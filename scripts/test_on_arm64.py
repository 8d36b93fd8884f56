"""Run the runtime's tests on the ARM64 userland of `edgekit hil`; see scripts/test-on-arm64."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from labgrid import Target

from edgekit_hil.drivers.userland import UserlandDriver
from edgekit_hil.images.image_cache import find_image
from edgekit_hil.images.root_folder import find_python, install_wheels
from edgekit_runtime.system.paths import find_cache_folder

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
FOLDERS: Final = ("tests/codecs", "tests/runtime", "tests/service", "tests/agent", "tests/offload/session")
# What tests import beside what the image has; the engines stay those of the image.
WHEELS: Final = tuple(
    """
    hypothesis==6.170.15 onnx==1.23.2 click==8.5.1 rich==15.0.0 packaging jsonschema prometheus_client
    protobuf flatbuffers
    """.split()
)
_DATA_LIMIT: Final = "qemu takes note of RLIMIT_DATA only for itself"
_TCP_INFO: Final = "qemu gives 4 bytes of TCP_INFO, so what the kernel has sent is not known"
_NEEDS_FLEET: Final = "needs a fleet's manager and broker; on the booted machine one reaches the agent"
# Files, and tests by the beginning of their name, that cannot pass here -> why.
LEFT_OUT: Final = {
    "tests/service/test_offload_serve.py": "runs commands of the host",
    "tests/service/test_plan_server.py": "runs commands of the host",
    "tests/agent/test_protocol.py": "compares with the fleet's packages, which the device has not",
    "tests/agent/test_agent.py": _NEEDS_FLEET,
    "tests/agent/test_agent_cdn.py": _NEEDS_FLEET,
    "tests/agent/test_agent_deltas.py": _NEEDS_FLEET,
    "tests/agent/test_agent_orders.py": _NEEDS_FLEET,
    "tests/agent/test_agent_service.py": _NEEDS_FLEET,
    "tests/agent/test_agent_trial.py": _NEEDS_FLEET,
    "tests/agent/test_idle_imports.py": _NEEDS_FLEET,
    "tests/agent/test_rollout_end_to_end.py": _NEEDS_FLEET,
    "tests/agent/test_step_child.py::test_step_whose_process_is_silent": "its process begins too slowly",
    "tests/offload/session/test_cancelled_requests.py::test_aborted_request_drops": _TCP_INFO,
    "tests/offload/session/test_cancelled_requests.py::test_request_on_a_new_connection": _TCP_INFO,
    "tests/offload/session/test_planned_package.py::test_service_offloads_behind": _TCP_INFO,
    "tests/offload/session/test_tls_servers.py::test_abort_over_tls": _TCP_INFO,
    "tests/runtime/test_tournament.py::test_an_engine_that_crashes": "qemu prints a line after SIGSEGV",
    "tests/service/test_governed_service.py::"
    "test_hot_device_is_served_in_another_way_and_no_request_fails[isolated]": (
        "the emulator cannot hold the limits of latency that it waits for"
    ),
    "tests/service/test_long_json.py::test_request_whose_json_is_read_during_a_swap": (
        "900,000 numbers of JSON take the emulator longer than the client waits"
    ),
    "tests/service/test_service_features.py::test_process_with_a_configuration": (
        "onnxruntime prints a line about the unknown processor first"
    ),
    "tests/service/test_workers.py::test_limits_hold_in_the_worker": _DATA_LIMIT,
    "tests/service/test_workers.py::test_worker_without_memory": _DATA_LIMIT,
    "tests/service/test_failing_loads.py::test_memory_that_a_process_may_not_have": _DATA_LIMIT,
}


def fetch_wheels() -> Path:
    """Return a folder with `WHEELS` for arm64, fetched on the first call."""
    folder = find_cache_folder() / "hil" / "test-wheels"
    stamp = folder / "wheels.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(WHEELS):
        install_wheels(WHEELS, find_python(find_image(booted=False).root), folder)
        stamp.write_text("\n".join(WHEELS))
    return folder


def _leave_out(test: str) -> str:
    """Return pytest's option that leaves out a test, or a file without importing it."""
    return f"--deselect={test}" if "::" in test else f"--ignore={test}"


def main() -> int:
    """Run pytest there, and return its exit code."""
    wheels = fetch_wheels()
    target = Target("suite")
    # The image's own folder of wheels comes first: its engines run under qemu, and newer ones do not.
    driver = UserlandDriver(target, "device", read_only=[str(ROOT), str(wheels)])
    target.activate(driver)
    try:
        own = f"/usr/local/lib/python{find_python(find_image(booted=False).root)}/dist-packages"
        path = ":".join([own, *(str(ROOT / source) for source in SOURCES)])
        arguments = sys.argv[1:] or [*FOLDERS, *map(_leave_out, LEFT_OUT)]
        pytest = ["python3", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        variables = [f"PYTHONPATH={path}:{ROOT}:{wheels}", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis"]
        command = [*driver.enter(), "env", "-C", str(ROOT), *variables, *pytest]
        return subprocess.run(command, check=False).returncode
    finally:
        target.deactivate(driver)


if __name__ == "__main__":
    sys.exit(main())
