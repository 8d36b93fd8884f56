"""Signatures verified in another process: the verdicts are those of `TrustStore`, and it fails closed."""

import contextlib
import functools
import hashlib
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
from tests.descriptor_parts import without_descriptors
from tests.waiting import open_when_read, wait_for

from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.child_process import child_environment
from edgekit_runtime.trust.dsse import EVIDENCE_PREDICATE_TYPE, PACKAGE_PREDICATE_TYPE, Statement
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_runtime.trust.verifier_process import VerifyingProcess
from edgekit_toolkit.packaging.signing_keys import StatementSigner

copied = pytest.mark.usefixtures("copied_children_of_test")

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


@copied
@pytest.mark.parametrize("rests", [False, True])
def test_verdicts_are_those_of_the_trust_store(
    maker: Any, other_signer: StatementSigner, keys: Path, trust: VerifyingProcess, rests: bool
) -> None:
    store = TrustStore.from_folder(keys)
    if rests:
        trust.stop_when_idle()
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


@copied
def test_a_package_is_read_with_it(package_path: Path, maker: Any, trust: VerifyingProcess) -> None:
    with read_package(package_path, trust) as package:
        assert package.key_id == maker.signer.key_id


def test_a_process_that_rests_leaves_none_behind(maker: Any, keys: Path) -> None:
    before = find_children()
    with VerifyingProcess(keys) as trust:
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")
        assert len(find_children() - before) == 1
        trust.stop_when_idle()
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
    trust.stop_when_idle()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnavailableError, match="ended before it answered"):
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_a_process_that_hangs_is_replaced_by_one_that_answers(maker: Any, keys: Path) -> None:
    with VerifyingProcess(keys, answer_s=60.0, first_share=0.01) as trust:
        kill_verifiers(signal.SIGSTOP)
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_processes_that_all_hang_are_given_up_in_the_time_of_one(
    maker: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead("#!/bin/sh\nexec sleep 60\n", tmp_path, monkeypatch)
    with VerifyingProcess(keys, answer_s=6.0) as trust:
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match="hangs"):
            trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")
        assert time.monotonic() - began_s < 10  # 12 for two times that of one


def test_a_lack_of_descriptors_is_no_verdict(maker: Any, keys: Path, trust: VerifyingProcess) -> None:
    trust.stop_when_idle()
    for spare in range(10):
        # Each has an envelope of its own, since what was verified once is remembered.
        statement = Statement("manifest.json", str(spare) * 64, PACKAGE_PREDICATE_TYPE, {})
        question = maker.signer(statement.to_bytes()), PACKAGE_PREDICATE_TYPE, "x"
        with without_descriptors(os.getpid(), spare):
            for ask in (
                functools.partial(trust.verify, *question),
                trust.check_keys,
                lambda question=question: TrustStore.from_folder(keys).verify(*question),
            ):
                with contextlib.suppress(UnavailableError):
                    ask()
                    assert spare, "the keys were read without a descriptor"
        trust.verify(*question)


def test_what_is_printed_in_the_process_is_no_answer(
    other_signer: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_first("print('null', flush=True)", tmp_path, monkeypatch)
    with VerifyingProcess(keys) as trust:
        trust.check_keys()
        with pytest.raises(SignatureError):
            trust.verify(other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_a_later_process_leaves_processors_and_memory_to_requests(
    keys: Path, tmp_path: Path, trust: VerifyingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.stop_when_idle()
    before = find_children()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    run_first(f"open({str(gate)!r}).close()", tmp_path, monkeypatch)
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trust.check_keys)
        with open_when_read(gate, lambda: not asked.done()):
            (child,) = find_children() - before
            wait_for(lambda: os.getpriority(os.PRIO_PROCESS, child) == expected)
            session = Path(f"/proc/{child}/autogroup")
            wait_for(lambda: not session.exists() or session.read_text().endswith("nice 5\n"))
            score = Path(f"/proc/{child}/oom_score_adj")  # who is killed first if memory runs out
            wait_for(lambda: int(score.read_text()) >= 200)
        asked.result(30)


@copied
def test_a_file_that_is_no_key_is_named(keys: Path) -> None:
    (keys / "bad.pub.pem").write_text("no key")
    with VerifyingProcess(keys) as trust:
        for _ in range(2):
            with pytest.raises(SignatureError, match=r"bad\.pub\.pem"):
                trust.check_keys()


def test_it_ends_with_who_started_it(keys: Path) -> None:
    """Also where it could not read the end of the pipe."""
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from edgekit_runtime.trust.verifier_process import *;"
        "trust = VerifyingProcess(Path(sys.argv[1])); trust.check_keys();"
        "child = int(Path('/proc/thread-self/children').read_text()); os.kill(child, signal.SIGSTOP);"
        "print(child, Path(f'/proc/{child}/cmdline').read_text(), flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(keys)],
        env=child_environment(),
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    child, _, seen = ended.stdout.partition(" ")
    assert (ended.returncode, str(keys) in seen) == (-signal.SIGKILL, True)
    wait_for(lambda: str(keys) not in read_command_line(int(child)))


def test_a_question_that_was_given_up_answers_no_other_one(
    maker: Any, other_signer: StatementSigner, trust: VerifyingProcess
) -> None:
    def give_up(_number: int, _frame: object) -> None:
        raise MemoryError

    trust.check_keys()
    kill_verifiers(signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(MemoryError):
            trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "good")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    kill_verifiers(signal.SIGCONT)
    with pytest.raises(SignatureError):
        trust.verify(other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "bad")


def test_an_answer_about_another_envelope_is_none(
    maker: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hashlib.sha256(maker.signer(PAYLOAD)).hexdigest()
    start_instead(
        f"""#!{sys.executable}
import socket, sys
lines = socket.socket(fileno=int(sys.argv[3])).makefile("rw")
for line in lines:
    lines.write('["{other} {EVIDENCE_PREDICATE_TYPE}"]\\n')
    lines.flush()
""",
        tmp_path,
        monkeypatch,
    )
    with VerifyingProcess(keys) as trust, pytest.raises(UnavailableError):
        trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "x")


def test_last_words_of_a_process_are_said(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead("#!/bin/sh\necho out of luck >&2\nexit 3\n", tmp_path, monkeypatch)
    with (
        VerifyingProcess(keys) as trust,
        pytest.raises(UnavailableError, match="answered, with exit code 3: out of luck; try again"),
    ):
        trust.check_keys()


@pytest.mark.parametrize("rests", [False, True])
def test_the_end_waits_for_no_answer(keys: Path, rests: bool) -> None:
    before = find_children()
    trust = VerifyingProcess(keys)
    trust.check_keys()
    kill_verifiers(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(trust.check_keys)
        wait_for(asked.running)
        if rests:
            pool.submit(trust.stop_when_idle).result(5)
        pool.submit(trust.__exit__, None, None, None).result(5)
        with pytest.raises(UnavailableError):
            asked.result(5)
    assert find_children() == before
    with pytest.raises(UnavailableError, match="the service ends"):
        trust.check_keys()


@copied
def test_a_pipe_among_the_keys_is_refused(keys: Path, trust: VerifyingProcess) -> None:
    trust.check_keys()
    (keys / "link.pub.pem").symlink_to(keys / "k.pub.pem")
    trust.check_keys()
    os.mkfifo(keys / "slow.pub.pem")
    with pytest.raises(SignatureError, match=r"slow\.pub\.pem: is no regular file"):
        trust.check_keys()


@copied
@pytest.mark.parametrize("rests", [False, True])
def test_a_key_that_was_removed_is_not_trusted_again(
    maker: Any, keys: Path, trust: VerifyingProcess, rests: bool
) -> None:
    if rests:
        trust.stop_when_idle()
    envelope = maker.signer(PAYLOAD)
    trust.verify(envelope, PACKAGE_PREDICATE_TYPE, "x")
    (keys / "k.pub.pem").rename(keys / "k.away")
    with pytest.raises(SignatureError, match="trusted are: none"):
        trust.verify(envelope, PACKAGE_PREDICATE_TYPE, "x")
    (keys / "k.away").rename(keys / "k.pub.pem")
    trust.verify(envelope, PACKAGE_PREDICATE_TYPE, "x")


def start_instead(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of Python be this one."""
    path = folder / "instead"
    path.write_text(script)
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def run_first(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of Python begin with `code`."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder / "site"))


def kill_verifiers(number: int) -> None:
    for pid in find_children():
        # As its module: a server of copies names it too, among those that it has imported.
        if b"\0-m\0edgekit_runtime.trust.verifier_process\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, number)


def read_command_line(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    return ""
