"""A device for tests: enrols over HTTPS, speaks MQTT by gmqtt, and signs what it states."""

import asyncio
import contextlib
import hashlib
import http.client
import json
import ssl
import time
from dataclasses import replace

import gmqtt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID
from gmqtt.mqtt.constants import MQTTv311

from edgekit_runtime.agent.documents import (
    Desired,
    Enrolment,
    EnrolmentCode,
    Hello,
    Reported,
    topic,
)
from edgekit_runtime.agent.manager_keys import read_named
from edgekit_runtime.agent.signing import seal, unseal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_plain


def make_csr(key, name="anything"):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(Encoding.PEM).decode()


def post(address, authority, path, body):
    """Return status and content of the answer of the fleet's web server."""
    context = ssl.create_default_context(cadata=authority)
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), context=context, timeout=10)
    try:
        data = body if isinstance(body, bytes) else encode_json(body)
        connection.request(
            "POST" if body is not None else "GET", path, body=data if body is not None else None
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class FleetDevice:
    def __init__(self, folder, invitation, authority, facts=None):
        self.folder, self.key, self.sequence = folder, Ed25519PrivateKey.generate(), 0
        self.code = EnrolmentCode.parse(invitation.code)
        self.authority, self.facts = authority, facts or {"target": "x86-64"}
        self.desired = []
        self.client = None

    def request(self):
        return {"secret": self.code.secret, "csr": make_csr(self.key), "facts": self.facts}

    def enrol(self):
        status, data = post(self.code.address, self.authority, "/enrol", self.request())
        assert status == 200, data
        self.enrolment = from_plain(Enrolment, json.loads(data), "answer")
        self.name = self.enrolment.device
        self.folder.mkdir(exist_ok=True)
        for name, text in (("crt", self.enrolment.certificate), ("ca", self.enrolment.authority)):
            (self.folder / name).write_text(text)
        private = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (self.folder / "key").write_bytes(private)
        self.manager = read_named(self.enrolment.tuf_root)
        assert len(self.manager) == 1
        return self

    def context(self):
        context = ssl.create_default_context(cafile=self.folder / "ca")
        context.load_cert_chain(self.folder / "crt", self.folder / "key")
        return context

    async def connect(self, held=None, *, reported=0, promises_will=True):
        self.sequence += 1
        will = Hello(device=self.name, sequence=self.sequence, online=False, runtime="0.1.0")
        envelope = seal(will, "hello", self.key)
        message = gmqtt.Message(topic(self.name, "hello"), envelope, qos=1, retain=True)
        self.client = gmqtt.Client(self.name, clean_session=True, will_message=message)
        self.client.set_config({"reconnect_retries": 0})
        self.client.on_message = self._receive
        ready, ended = asyncio.Event(), asyncio.Event()
        self.client.on_subscribe = lambda *_: ready.set()
        self.client.on_disconnect = lambda *_: ended.set()
        host, _, port = self.enrolment.brokers[0].rpartition(":")
        connecting = self.client.connect(host.strip("[]"), int(port), ssl=self.context(), version=MQTTv311)
        await _unless(ended, connecting)
        self.client.subscribe(topic(self.name, "desired"), qos=1)
        await _unless(ended, ready.wait())
        held = held if held is not None else (self.desired[-1].version if self.desired else 0)
        digest = hashlib.sha256(envelope).hexdigest() if promises_will else ""
        hello = replace(will, online=True, desired_version=held, reported=reported, will_sha256=digest)
        self.send("hello", hello)

    def report(self, **fields):
        self.sequence += 1
        held = self.desired[-1].version if self.desired else 0
        known = {"status": "converged", "desired_version": held, "facts": self.facts, **fields}
        document = Reported(device=self.name, sequence=self.sequence, **known)
        self.send("reported", document)
        return document

    def send(self, kind, document, *, to=None, key=None):
        envelope = seal(document, kind, key or self.key)
        self.client.publish(
            topic(to or self.name, kind), envelope, qos=1, retain=kind in ("hello", "reported")
        )

    def drop(self):
        """Break the connection off, so that the broker sends the last will."""
        self.client._connection._transport.abort()

    async def disconnect(self):
        with contextlib.suppress(OSError):  # a message may come while TLS ends
            await self.client.disconnect()

    def _receive(self, _client, name, payload, _qos, _properties):
        self.desired.append(unseal(payload, "desired", Desired, self.manager, name))
        return 0


async def eventually(check, limit_s=60.0):
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        found = check()
        if found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"it did not come true in {limit_s} s")


async def _unless(ended, step):
    """Await a step of a connection, which the broker may end."""
    tasks = {asyncio.ensure_future(step), asyncio.ensure_future(ended.wait())}
    done, pending = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
    if not done or ended.is_set():
        raise ConnectionError("the broker has ended the connection, or does not answer")
