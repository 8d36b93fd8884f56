"""When samples are sent, and how they travel, with a manager of the test's own."""

import http.server
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.free_port import free_port

from edgekit_fleet.identity.authority import Authority
from edgekit_runtime.agent.artifacts.download import DownloadLimits
from edgekit_runtime.agent.artifacts.upload import SampleLink, UploadBudgetError, UploadReply, send_samples
from edgekit_runtime.agent.conditions import DeviceConditions
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.agent.sample_uploads import SampleUploads
from edgekit_runtime.errors import TransportError
from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder

ALLOWED: Mapping[str, Any] = {"allowed": True, "orders": {}}
NOON = DeviceConditions(now_s=1_000_000.0, minute_of_day=720)


def make_order(order: str = "o-1", **changes: Any) -> SampleOrder:
    stated: dict[str, Any] = {
        "id": order,
        "model": "m",
        "triggers": (SampleTrigger(kind="random"),),
        "per_day": 20.0,
        "max_bytes": 1 << 20,
        "ends_at": 2e9,
        "public_key": "",
    }
    return SampleOrder(**{**stated, **changes})


def store(folder: SampleFolder, *sizes: int, order: str = "o-1") -> list[str]:
    ids = [f"{number:032x}" for number in range(len(sizes))]
    for sample_id, size_bytes in zip(ids, sizes, strict=True):
        folder.write("m", (order, "random"), sample_id, bytes(number % 251 for number in range(size_bytes)))
    return ids


class Manager:
    """Keeps parts of samples as the fleet's web server does.

    Attributes:
        cuts: numbers of the requests that are cut in the middle of their body.
        lost: numbers of the requests whose answer does not arrive.
        outages: numbers of the requests whose sample is whole, and cannot be stored now.
        refusals: id -> status of a sample that is never taken.
    """

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self.durable: dict[str, bytes] = {}
        self.cuts: set[int] = set()
        self.lost: set[int] = set()
        self.outages: set[int] = set()
        self.refusals: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent_bytes = 0

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> UploadReply:
        self.requests.append((method, headers.get("Content-Range", "")))
        sample_id = path.removeprefix("/samples/")
        held = self.durable.get(sample_id) or self.parts.get(sample_id, b"")
        self.sent_bytes += len(body)
        if sample_id in self.refusals:
            return UploadReply(self.refusals[sample_id], None)
        if method == "HEAD":
            return UploadReply(204, len(held)) if held else UploadReply(404, None)
        stretch, _, size = headers["Content-Range"].removeprefix("bytes ").partition("/")
        begin = int(stretch.partition("-")[0])
        if sample_id in self.durable:
            return UploadReply(201, None)
        if len(held) == int(size):
            held = b""
        if begin != len(held):
            return UploadReply(409, len(held))
        if len(self.requests) in self.cuts:
            self.parts[sample_id] = held + body[: len(body) // 2]
            raise TransportError("cut")
        self.parts[sample_id] = held + body
        if len(self.parts[sample_id]) == int(size):
            if len(self.requests) in self.outages:
                return UploadReply(503, None)
            self.durable[sample_id] = self.parts.pop(sample_id)
            if len(self.requests) in self.lost:
                raise TransportError("lost")
            return UploadReply(201, None)
        return UploadReply(202, len(self.parts[sample_id]))


def send(folder: SampleFolder, manager: Manager, **options: Any) -> int:
    options = {"stop": threading.Event(), **options}
    return send_samples(folder.list_samples(), folder, manager.ask, **options)


def test_samples_travel_in_parts_and_are_deleted_once_they_are_durable(tmp_path: Path) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    store(folder, 10, 200_000)
    contents = {sample.id: sample.path.read_bytes() for sample in folder.list_samples()}

    assert send(folder, manager) == 2
    assert manager.durable == contents
    assert folder.list_samples() == []
    assert len([method for method, _ in manager.requests if method == "HEAD"]) == 1


def test_an_upload_that_is_cut_goes_on_where_the_manager_has_it(tmp_path: Path) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    (sample_id,) = store(folder, 300_000)
    (content,) = [sample.path.read_bytes() for sample in folder.list_samples()]
    manager.cuts = {3, 6}

    for _ in range(2):
        with pytest.raises(TransportError):
            send(folder, manager)
        assert len(folder.list_samples()) == 1
    assert send(folder, manager) == 1
    assert manager.durable == {sample_id: content}
    assert manager.sent_bytes <= 300_000 + 2 * (64 << 10)


@pytest.mark.parametrize("fault", ["lost", "outages"])
def test_a_whole_sample_without_an_answer_is_sent_again(tmp_path: Path, fault: str) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    store(folder, 100_000, 10)
    setattr(manager, fault, {3})

    with pytest.raises(TransportError):
        send(folder, manager)
    assert len(folder.list_samples()) == 2
    assert send(folder, manager) == 2
    assert len(manager.durable) == 2
    assert folder.list_samples() == []


def test_what_the_manager_never_takes_is_deleted_and_what_it_takes_later_stays(tmp_path: Path) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    ids = store(folder, 10, 20, 30)
    manager.refusals = {ids[0]: 403, ids[1]: 429}

    with pytest.raises(TransportError, match="429"):
        send(folder, manager)
    assert [sample.id for sample in folder.list_samples()] == ids[1:]


@pytest.mark.parametrize(
    "reply",
    [
        UploadReply(202, None),
        UploadReply(202, 0),
        UploadReply(409, 0),
        UploadReply(500, None),
        UploadReply(404, None),  # of a server that is no fleet's
        UploadReply(400, None),  # a proxy cut the body
        UploadReply(202, 10**12),
    ],
)
def test_a_manager_that_answers_nonsense_ends_the_upload_and_the_sample_stays(
    tmp_path: Path, reply: UploadReply
) -> None:
    folder = SampleFolder(tmp_path)
    store(folder, 100)

    with pytest.raises(TransportError):
        send_samples(folder.list_samples(), folder, lambda *_: reply, stop=threading.Event())
    assert len(folder.list_samples()) == 1


def test_no_more_is_sent_than_the_budget_allows_or_after_a_stop(tmp_path: Path) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    store(folder, 300_000)

    with pytest.raises(UploadBudgetError):
        send(folder, manager, most_bytes=200_000)
    assert 100_000 < manager.sent_bytes <= 200_000
    stop = threading.Event()
    stop.set()
    before = manager.sent_bytes
    assert send(folder, manager, stop=stop) == 0
    assert manager.sent_bytes == before


def test_a_sample_that_its_owner_deletes_meanwhile_is_not_sent_on(tmp_path: Path) -> None:
    folder, manager = SampleFolder(tmp_path), Manager()
    store(folder, 300_000)

    def ask(method: str, path: str, headers: Mapping[str, str], body: bytes) -> UploadReply:
        folder.clear()
        return manager.ask(method, path, headers, body)

    assert send_samples(folder.list_samples(), folder, ask, stop=threading.Event()) == 0
    assert manager.sent_bytes == 0


def test_samples_are_sent_only_while_all_allows_it(tmp_path: Path) -> None:
    store(SampleFolder(tmp_path / SAMPLES_FOLDER), 10)
    uploads = SampleUploads(tmp_path)

    assert uploads.may_send(0.0, (), NOON, ALLOWED)
    assert not uploads.may_send(0.0, (), NOON, {})  # no service runs
    assert not uploads.may_send(0.0, (), NOON, {"allowed": False})
    assert not uploads.may_send(0.0, ("o-1",), NOON, ALLOWED)
    assert not uploads.may_send(0.0, (), DeviceConditions(now_s=None, budget_left_bytes=0), ALLOWED)
    assert not uploads.may_send(0.0, (), DeviceConditions(now_s=None, battery=0.1), ALLOWED)
    assert uploads.list_held((make_order(window="01:00-04:00"), make_order("o-2")), NOON) == ("o-1",)
    assert uploads.list_held((make_order(window="11:00-13:00"),), NOON) == ()


def test_an_upload_that_fails_is_tried_again_later_and_later(tmp_path: Path) -> None:
    store(SampleFolder(tmp_path / SAMPLES_FOLDER), 10)
    uploads, now_s, pauses = SampleUploads(tmp_path), 0.0, []
    for _ in range(8):
        uploads.note_end(StepResult(outcome="retry"), now_s)
        begin_s = now_s
        while not uploads.may_send(now_s, (), NOON, ALLOWED):
            now_s += 30.0
        pauses.append(now_s - begin_s)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    uploads.note_end(StepResult(), now_s)
    assert uploads.may_send(now_s, (), NOON, ALLOWED)


def test_a_report_states_what_came_of_each_order(tmp_path: Path) -> None:
    store(SampleFolder(tmp_path / SAMPLES_FOLDER), 10, 20)
    uploads = SampleUploads(tmp_path)
    uploads.look(0.0)
    orders = (make_order(), make_order("o-2"), make_order("o-3", ends_at=5.0))
    entry = {"triggers": {"random": 3}, "dropped": 1, "error": "x" * 1000}

    reports = uploads.report(orders, {"allowed": True, "orders": {"o-1": entry, "o-3": entry}}, 10.0)

    first = reports["o-1"]
    assert (first.state, first.triggers, first.waiting, first.waiting_bytes, first.dropped) == (
        "collecting",
        {"random": 3},
        2,
        30,
        1,
    )
    assert len(first.error) == 200
    assert (reports["o-2"].state, reports["o-3"].state) == ("missing", "ended")
    forbidden = uploads.report(orders, {"allowed": False, "orders": {}}, 10.0)
    assert {report.state for report in forbidden.values()} == {"forbidden"}
    odd = uploads.report(orders, {"allowed": True, "orders": {"o-1": {"odd": 1}, "o-2": [7]}}, 10.0)
    assert odd["o-1"].waiting == 2


class TlsManager(Manager):
    """The same over TLS, on a port of this machine; it notes the connections."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        authority = Authority(folder)
        authority.make_server(("127.0.0.1",))
        self.context = make_context(authority.certificate_path.read_text())
        self.connections = 0
        manager = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                manager.connections += 1

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                reply = manager.ask(self.command, self.path, dict(self.headers), body)
                self.send_response(reply.status)
                self.send_header("Content-Length", "0")
                if reply.offset is not None:
                    self.send_header("Upload-Offset", str(reply.offset))
                self.end_headers()

            do_HEAD = do_PUT = answer  # noqa: N815  # named by the library

            def log_message(self, *_: object) -> None:
                pass

        port = free_port()
        self.web = f"https://127.0.0.1:{port}"
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.pair("server"))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> "TlsManager":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_samples_travel_over_one_connection_and_their_bytes_count(tmp_path: Path) -> None:
    folder, stop, counted = SampleFolder(tmp_path / "samples"), threading.Event(), list[int]()
    store(folder, 10, 200_000, 30)
    contents = {sample.id: sample.path.read_bytes() for sample in folder.list_samples()}
    with TlsManager(tmp_path / "authority") as manager:
        limits = DownloadLimits(bytes_per_s=10e6)
        link = SampleLink(manager.web, manager.context, limits, count=counted.append, stop=stop)
        assert send_samples(folder.list_samples(), folder, link.ask, stop=stop) == 3
        link.close()
        assert (manager.durable, manager.connections, sum(counted)) == (contents, 1, 200_040)
        gone = SampleLink("https://127.0.0.1:1", manager.context, limits, count=counted.append, stop=stop)
        with pytest.raises(TransportError):
            gone.ask("HEAD", "/samples/a", {}, b"")
    assert folder.list_samples() == []
