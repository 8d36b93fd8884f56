"""An agent that has done updates holds nothing of what the update needed."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import bounded

from edgekit_fleet.operations.releases import rotate_keys
from edgekit_fleet.store.tables import AuditRow

pytest.importorskip("onnxruntime")

# Runs as ever, and says at the end what was ever imported.
AGENT = (
    "import sys; from edgekit_runtime.cli import main; code = main(sys.argv[1:]);"
    " print(*sys.modules); sys.exit(code)"
)
UNUSED = (
    "numpy",  # 10 MB
    "tuf",
    "cryptography.x509",
    "cryptography.hazmat.primitives.serialization",
    "securesystemslib",
    "onnxruntime",
    "ctypes",
    "edgekit_runtime.package.manifest",
    "edgekit_runtime.sessions",
    "edgekit_runtime.client.client",
    "edgekit_runtime.trust.trust_store",
    "edgekit_runtime.agent.artifacts",
    "edgekit_runtime.agent.enrolment",
    "edgekit_runtime.agent.execution.local_steps",
)

# What a step that downloads a whole package, or refreshes metadata, imports.
STEP = (
    "import edgekit_runtime.agent.execution.step_child, edgekit_runtime.agent.execution.local_steps,"
    " edgekit_runtime.trust.trust_store, sys; print(*sys.modules)"
)


def test_step_without_a_delta_imports_no_numpy():
    child = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    imported = set(child.stdout.split())
    assert "edgekit_runtime.agent.artifacts.download" in imported
    assert imported.isdisjoint({"numpy", "tuf", "edgekit_runtime.agent.artifacts.deltas"})


def test_agent_imports_nothing_for_updates_and_for_a_new_key_of_the_manager(site):  # noqa: F811
    """Neither agent nor manager is started again."""
    site.enrol()
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, "agent"], env=site.variables, stdout=subprocess.PIPE, text=True
    )
    with bounded(process):
        site.want("1.0.0")
        site.wait_status("converged", ["succeeded"])
        before = site.reported().desired_version
        rotate_keys(site.fleet.folder, site.fleet.store, ("manager",), actor="test")
        site.wait(lambda: site.reported().desired_version > before, "the document by the new key")
        assert site.status() == ("converged", ["succeeded"])
        assert process.poll() is None
        with site.fleet.store.transaction() as session:
            events = session.scalars(select(AuditRow.action).where(AuditRow.subject == site.name)).all()
        assert [each for each in events if "event" in each or "alarm" in each] == []
        site.want("2.0.0")
        site.wait_version("2.0.0")
        children = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
        process.terminate()
        printed, _ = process.communicate(timeout=20)
    imported = set(printed.split())
    assert "edgekit_runtime.agent.agent" in imported
    assert {
        name for name in imported if any(name == one or name.startswith(f"{one}.") for one in UNUSED)
    } == set()
    assert "".join(children) == ""
