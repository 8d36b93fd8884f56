"""What a device must have, and which packages are for it."""

import io
import zipfile
from pathlib import Path

import pytest

import edgekit_runtime
from edgekit_hil.benches.runtime_digest import hash_sources
from edgekit_hil.provisioning.device_facts import InstallFacts
from edgekit_hil.provisioning.ssh_host import SshHost
from edgekit_hil.provisioning.wheelhouse import Wheelhouse, make_own_wheel
from edgekit_runtime.errors import ConfigError, ProvisioningError

PI = {
    "machine": "aarch64",
    "libc": "glibc 2.36",
    "python": "/usr/bin/python3 3.11.2 CPython 0 64",
    "free_kb": "1000",
    "rights": "sudo",
}


def make_facts(**changes):
    return InstallFacts.parse([f"{name}={value}" for name, value in {**PI, **changes}.items()])


def plan(facts, engine="ort"):
    return Wheelhouse.plan(facts, facts.choose_python(), engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "armv7l"}, "armv7l, expected one of aarch64, x86_64"),
        ({"rights": "none"}, "sudo without a password"),
        (
            {"python": "/usr/bin/python3 3.9.2 CPython 0 64"},
            r"no 64-bit Python 3.10 to 3.13.*found: CPython 3.9.2",
        ),
        ({"python": "/usr/bin/python3 3.14.0 CPython 0 64"}, "found: CPython 3.14.0"),
        ({"python": "/usr/bin/pypy3 3.11.2 PyPy 0 64"}, "found: PyPy 3.11.2"),
        ({"python": "/home/pi/python3 3.11.2 CPython 0 64"}, r"outside of /root .*found: CPython 3.11.2, "),
        (
            {"python": "/usr/bin/python3 3.11.2 CPython 0 32"},
            r"no 64-bit Python .*found: CPython 3.11.2, 32 bits",
        ),
        ({"python": "nonsense"}, "found: none"),
        ({"libc": "musl 1.2"}, "expected glibc"),
        ({"libc": ""}, "'unknown', expected glibc"),
        ({"libc": "glibc 2.5"}, "expected glibc 2.17 or newer"),
        ({"free_kb": "?"}, "does not describe itself"),
    ],
)
def test_device_that_cannot_run_edgekit_is_refused(changes, message):
    with pytest.raises(ProvisioningError, match=message):
        plan(make_facts(**changes))


def test_default_python_is_taken_where_it_fits():
    lines = [f"{name}={value}" for name, value in PI.items() if name != "python"]
    pythons = ["/usr/bin/python3 3.9.2 CPython 0 64", "/usr/bin/python3.12 3.12.1 CPython 1 64"]
    facts = InstallFacts.parse([*lines, *(f"python={python}" for python in pythons)])
    assert facts.choose_python().version == "3.12.1"
    assert facts.choose_python().has_tensorrt


def test_packages_fit_the_python_and_platform_of_the_device():
    old, new = plan(make_facts(python="/usr/bin/python3 3.10.12 CPython 1 64")), plan(make_facts())
    assert "onnxruntime==1.23.2 --hash=sha256:" in old.requirements
    assert "onnxruntime==1.24.4 --hash=sha256:" in new.requirements
    assert "typing-extensions" in old.requirements
    assert "typing-extensions" not in new.requirements
    assert new.tags[:6] == (
        *("--implementation", "cp", "--python-version", "3.11"),
        *("--platform", "manylinux_2_36_aarch64"),
    )
    assert all(" --hash=sha256:" in line for line in new.requirements.splitlines())
    assert "ai-edge-litert" in plan(make_facts(), "litert").requirements


def test_wheel_of_a_device_has_the_sources_that_a_bench_expects(tmp_path):
    with zipfile.ZipFile(io.BytesIO(make_own_wheel()[1])) as wheel:
        wheel.extractall(tmp_path)
    ours = Path(edgekit_runtime.__file__).parent
    assert hash_sources(tmp_path / ours.name) == hash_sources(ours)


def test_release_is_the_same_for_the_same_device_alone():
    releases = [
        plan(make_facts()).release,
        plan(make_facts(), "litert").release,
        plan(make_facts(machine="x86_64")).release,
        plan(make_facts(python="/usr/bin/python3 3.11.3 CPython 0 64")).release,
        plan(make_facts(libc="glibc 2.35")).release,
    ]
    assert len(set(releases)) == 5
    assert plan(make_facts(free_kb="5", system="other")).release == releases[0]


def test_our_wheel_is_whole_and_always_the_same():
    name, content = make_own_wheel()
    assert make_own_wheel() == (name, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert "edgekit_runtime/py.typed" in names
    assert not [each for each in names if each.endswith(".pyc")]
    assert [each.partition("/")[2] for each in names if ".dist-info/" in each] == [
        "METADATA",
        "WHEEL",
        "entry_points.txt",
        "RECORD",
    ]


@pytest.mark.parametrize("text", ["", "pi@", "-oProxyCommand=x", "pi@host:port", "pi@host:"])
def test_malformed_host_is_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        SshHost.parse(text)


def test_host_may_have_user_and_port():
    assert SshHost.parse("pi@10.0.0.5:2222") == SshHost("pi@10.0.0.5", 2222)
    assert SshHost.parse("jetson") == SshHost("jetson")
