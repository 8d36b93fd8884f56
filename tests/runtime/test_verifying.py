"""Signatures verified in another process: the verdicts are those of `TrustStore`, and it fails closed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgekit_runtime import verifying
from edgekit_runtime.archive import read_package
from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.processes import child_environment
from edgekit_runtime.signing import TrustStore
from edgekit_runtime.statements import EVIDENCE_PREDICATE_TYPE, PACKAGE_PREDICATE_TYPE, Statement
from edgekit_runtime.verifying import VerifyingProcess
from edgekit_toolkit.sign import StatementSigner

PAYLOAD = Statement("manifest.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {}).to_bytes()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the key that `maker` signs with."""
    folder = tmp_path / "keys"
    folder.mkdir()
    public = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key()
    (folder / "k.pub.pem").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return folder


@pytest.fixture
def trust(keys: Path) -> Iterator[VerifyingProcess]:
    with VerifyingProcess(keys) as process:
        yield process


def find_children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for children in lists for pid in children.read_text().split()}


def wrong_signature(maker: Any, other_signer: StatementSigner) -> bytes:
    data: bytes = other_signer(PAYLOAD).replace(other_signer.key_id.encode(), maker.signer.key_id.encode())
    return data


@pytest.mark.parametrize("rests", [False, True])
def test_verdicts_are_those_of_the_trust_store(
    maker: Any, other_signer: StatementSigner, keys: Path, trust: VerifyingProcess, rests: bool
) -> None:
    store = TrustStore.from_folder(keys)
    if rests:
        trust.rest()
    good = maker.signer(PAYLOAD)
    for _ in range(2):
        assert trust.verify(good, PACKAGE_PREDICATE_TYPE, "x") == store.verify(
            good, PACKAGE_PREDICATE_TYPE, "x"
        )
    for bad, predicate_type in (
        (other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE),
        (wrong_signature(maker, other_signer), PACKAGE_PREDICATE_TYPE),
        (good, EVIDENCE_PREDICATE_TYPE),
        (good + b"\n", PACKAGE_PREDICATE_TYPE),
        (b"\xff\n", PACKAGE_PREDICATE_TYPE),
    ):
        with pytest.raises(SignatureError) as expected:
            store.verify(bad, predicate_type, "x")
        with pytest.raises(SignatureError) as got:
            trust.verify(bad, predicate_type, "x")
        assert (str(got.value), got.value.key_id) == (str(expected.value), expected.value.key_id)


def test_a_package_is_read_with_it(package_path: Path, maker: Any, trust: VerifyingProcess) -> None:
    with read_package(package_path, trust) as package:
        assert package.key_id == maker.signer.key_id


def test_a_process_that_rests_leaves_none_behind(maker: Any, keys: Path) -> None:
    before = find_children()
    with VerifyingProcess(keys) as trust:
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")
        assert len(find_children() - before) == 1
        trust.rest()
        assert find_children() == before
        trust.check_keys()
        assert find_children() == before


def test_a_process_that_was_killed_is_replaced_by_one_that_answers(
    maker: Any, other_signer: Any, trust: VerifyingProcess
) -> None:
    trust.check_keys()  # it runs
    kill_verifiers(signal.SIGKILL)
    trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")
    kill_verifiers(signal.SIGKILL)
    with pytest.raises(SignatureError):
        trust.verify(other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_processes_that_all_end_accept_nothing(
    maker: Any, trust: VerifyingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.rest()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnavailableError, match="ended before it answered"):
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_a_process_that_hangs_is_replaced_by_one_that_answers(
    maker: Any, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "_ANSWER_S", 0.5)
    with VerifyingProcess(keys) as trust:
        monkeypatch.setattr(verifying, "_ANSWER_S", 60.0)  # of the next one
        kill_verifiers(signal.SIGSTOP)
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_what_is_printed_in_the_process_is_no_answer(
    other_signer: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('null', flush=True)")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with VerifyingProcess(keys) as trust:
        trust.check_keys()
        with pytest.raises(SignatureError):
            trust.verify(other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_a_later_process_leaves_the_processors_to_requests(keys: Path, trust: VerifyingProcess) -> None:
    trust.rest()
    before = find_children()
    key = (keys / "k.pub.pem").read_bytes()
    os.mkfifo(keys / "slow.pub.pem")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trust.check_keys)
        with (keys / "slow.pub.pem").open("wb") as slow:  # waits until it is read
            (child,) = find_children() - before
            expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
            assert os.getpriority(os.PRIO_PROCESS, child) == expected
            session = Path(f"/proc/{child}/autogroup")
            assert not session.exists() or session.read_text().endswith("nice 5\n")
            slow.write(key)
        asked.result(30)


def test_a_file_that_is_no_key_is_named(keys: Path) -> None:
    (keys / "bad.pub.pem").write_text("no key")
    with VerifyingProcess(keys) as trust:
        for _ in range(2):
            with pytest.raises(SignatureError, match=r"bad\.pub\.pem"):
                trust.check_keys()


def test_it_ends_with_who_started_it(keys: Path) -> None:
    """The end of the pipe says so, however its parent came to its end."""
    code = (
        "import os, sys; from pathlib import Path; from edgekit_runtime.verifying import VerifyingProcess;"
        "trust = VerifyingProcess(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(keys)], env=child_environment(), check=False)
    deadline_s = time.monotonic() + 30
    while any(str(keys) in line for line in read_command_lines()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def kill_verifiers(number: int) -> None:
    for pid in find_children():
        if b"edgekit_runtime.verifying" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, number)


def read_command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_text(errors="replace")
