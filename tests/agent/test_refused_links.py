"""An agent whose broker goes on refusing it, although the fleet's web server renews its certificate."""

import itertools
import signal

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.agent.parts import make_enrolment, make_root
from tests.fleet.attacks.attack_site import Broker, SimulatedTime

from edgekit_runtime import cli
from edgekit_runtime.agent import agent as agent_module
from edgekit_runtime.agent.link_watch import Renewal
from edgekit_runtime.agent.membership import LinkProblem, Membership
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.commands import agent as agent_command
from edgekit_runtime.dataclass_json import to_plain

END_S = 200.0


class RefusingBroker(Broker):
    """A link that is refused; a wait for a message takes a second of the simulated time."""

    clock = SimulatedTime()

    def __init__(self, *_):
        super().__init__()
        self.is_connected, self.problem, self.received = False, LinkProblem("revoked", is_refusal=True), self

    def start(self): ...
    def get_nowait(self): ...

    def get(self, timeout):
        self.clock.passed_s += timeout
        if self.clock.passed_s >= END_S:
            signal.raise_signal(signal.SIGTERM)
        raise agent_module.queue.Empty


@pytest.fixture
def member(tmp_path, monkeypatch):
    """Write the files of a device in a fleet; returns the folder that the commands use."""
    fleet, keys = tmp_path / "fleet", tmp_path / "keys"
    for folder in (fleet, keys):
        folder.mkdir()
    key = Ed25519PrivateKey.generate()
    enrolment = make_enrolment(tuf_root=make_root(key))  # else each agent refreshes its metadata at once
    (fleet / "enrolment.json").write_bytes(encode_json(to_plain(enrolment)))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (fleet / "device.key").write_bytes(pem)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setattr(Membership, "make_context", lambda *_: None)
    return tmp_path


def test_refused_device_asks_ever_more_rarely_though_each_renewal_succeeds(member, monkeypatch):
    asked_s, clock = [], SimulatedTime()

    def renew(_config, is_refused, _stated_s):
        asked_s.extend([clock.passed_s] if is_refused else [])
        return Renewal(is_new=is_refused)

    monkeypatch.setattr(RefusingBroker, "clock", clock)
    monkeypatch.setattr(agent_module, "MqttLink", RefusingBroker)
    monkeypatch.setattr(agent_module, "time", clock)
    monkeypatch.setattr(agent_command, "renew_certificate", renew)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert cli.main(["agent", "--state", str(member / "state"), "--socket", str(member / "none")]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    pauses_s = [after - before for before, after in itertools.pairwise(asked_s)]
    assert len(asked_s) == 6
    assert all(5.0 * 2**number <= pause_s for number, pause_s in enumerate(pauses_s))
