"""Samples from the field, from the command to the devices and back into a folder for the packager."""

import asyncio
import csv
import io

import numpy as np
import pytest
from sqlalchemy import select
from tests.fleet.console.test_sample_pages import make_picture
from tests.fleet.fleet_device import eventually
from tests.fleet.sample_site import SampleSite
from tests.fleet.test_fleet_commands import run, run_json

from edgekit_fleet.operations.devices import tag
from edgekit_fleet.operations.samples import StartSamples, parse_triggers, start
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.errors import FleetError
from edgekit_runtime.preprocessing.wav import read_wav
from edgekit_runtime.protocol.samples import SampleTensor, SampleTrigger


@pytest.fixture
def site(tmp_path):
    with SampleSite(tmp_path / "fleet").serve() as site:
        yield site


def test_order_reaches_the_devices_it_means_and_new_ones_until_it_is_stopped(fleet, capsys):
    folder = ("--folder", fleet.folder.path)
    start = (
        "samples",
        "start",
        "--model",
        "detector",
        "--to",
        "site=lyon",
        "--when",
        "uncertain:0.1 or drift",
    )
    assert "an administrator allows it" in run(capsys, *start, *folder, code=19).err
    run(capsys, "samples", "on", "--days", 30, *folder)

    async def follow():
        lyon, nice = (
            fleet.device(name, tags={"site": site}) for name, site in (("d1", "lyon"), ("d2", "nice"))
        )
        for device in (lyon.enrol(), nice.enrol()):
            await device.connect()
            await eventually(lambda device=device: device.desired)
        order = run_json(capsys, *start, "--rate", "5/day", "--window", "01:00-04:00", *folder)
        await eventually(lambda: lyon.desired[-1].samples)
        (sent,) = lyon.desired[-1].samples
        assert (sent.id, sent.model, sent.per_day, sent.window) == (
            order["id"],
            "detector",
            5.0,
            "01:00-04:00",
        )
        assert sent.triggers == (
            SampleTrigger(kind="uncertain", threshold=0.1),
            SampleTrigger(kind="drift"),
        )
        new = fleet.device("d3", tags={"site": "lyon"}).enrol()
        await new.connect()
        await eventually(lambda: new.desired and new.desired[-1].samples == (sent,))
        assert nice.desired[-1].samples == ()
        tag(fleet.store, "d2", {"site": "lyon"}, "ann")
        await eventually(lambda: nice.desired[-1].samples == (sent,))
        tag(fleet.store, "d2", {"site": "nice"}, "ann")
        await eventually(lambda: nice.desired[-1].samples == ())
        assert "stopped" in run(capsys, "samples", "stop", order["id"], *folder).out
        await eventually(lambda: not lyon.desired[-1].samples and not new.desired[-1].samples)
        for device in (lyon, nice, new):
            await device.disconnect()

    asyncio.run(follow())


@pytest.mark.parametrize(
    "text",
    ["", "sometimes", "uncertain:x", "uncertain:2", "random:-1", "drift:nan"],
)
def test_triggers_that_no_device_understands_are_refused(text):
    with pytest.raises(FleetError):
        parse_triggers(text)


@pytest.mark.parametrize("kinds", [("random", "random"), ("uncertain", "<script>")])
def test_orders_of_unknown_or_repeated_triggers_are_refused(site, kinds):
    triggers = tuple(SampleTrigger(kind=kind) for kind in kinds)
    with pytest.raises(FleetError, match="trigger"):
        start(site.store, StartSamples(model="m", selector="all", triggers=triggers), actor="ann")


def test_samples_become_a_folder_with_prepared_labels(site, tmp_path, capsys):
    sender, order = site.sender("d1"), site.order(model="detector")
    picture, answer = make_picture(), {"classes": [{"label": "=cmd|cat", "score": 0.4}]}
    sounds = {"media_type": "audio/x-raw; format=S16LE; rate=8000; channels=1", "triggers": ("random",)}
    tensor = SampleTensor(name="file", dtype="float32", shape=(1, 3))
    odd = {"name": "file", "dtype": "float32", "shape": (0, *[2**31 - 1] * 3)}
    values = np.array([[1, 2, 3]], "<f4").tobytes()
    sealed = [
        sender.seal(order, 1, content=picture, answer=answer),
        sender.seal(order, 2, content=bytes(8000), probability=1e-3, **sounds),
        sender.seal(order, 3, content=values, media_type="", tensors=(tensor,)),
        sender.seal(order, 4, content=b"1", media_type="video/x-raw; width=100; height=100"),
        sender.seal(order, 6, content=b"", media_type="", tensors=(SampleTensor(**odd),)),
    ]
    for sample_id, content in sealed:
        assert sender.put(sample_id, content).status == 201
    folder, output = ("--folder", site.folder.path), tmp_path / "field"
    get = ("samples", "get", "--model", "detector", "-o", output, *folder)
    result = run(capsys, *get)
    assert "3 new samples" in result.out and "left out" in result.err
    assert (output / f"{1:032x}.jpg").read_bytes() == picture
    assert read_wav(output / f"{2:032x}.wav")[1] == 8000
    with np.load(output / f"{3:032x}.npz") as arrays:
        assert arrays["file"].tolist() == [[1.0, 2.0, 3.0]]
    labels = read_rows(output / "labels.csv")
    assert f"{3:032x}.npz" not in labels  # the packager does not look for it there
    assert labels[f"{1:032x}.jpg"] == {"label": "", "suggestion": "'=cmd|cat"}
    selection = read_rows(output / "selection.csv")
    assert selection[f"{2:032x}.wav"]["probability"] == "0.001"
    assert selection[f"{2:032x}.wav"]["triggers"] == "random"
    text = (output / "labels.csv").read_text().replace("jpg,,", "jpg,dog,")
    (output / "labels.csv").write_text(text)
    assert sender.put(*sender.seal(order, 5, content=picture)).status == 201
    assert run_json(capsys, *get)["new"] == 1
    assert read_rows(output / "labels.csv")[f"{1:032x}.jpg"]["label"] == "dog"


def test_request_that_was_kept_and_drawn_counts_once(site, tmp_path, capsys):
    senders, order = [site.sender(name) for name in ("d1", "d2")], site.order(model="detector")
    kept = {"triggers": ("kept",), "probability": 1.0}
    sent = [
        (0, senders[0].seal(order, 1, content=make_picture(), **kept)),
        (0, senders[0].seal(order, 2, content=make_picture(), probability=0.01)),
        (0, senders[0].seal(order, 3, content=make_picture(), taken_at=1.8e9 + 0.125)),
        (1, senders[1].seal(order, 4, content=make_picture())),  # the other device's at the same time
    ]
    for index, (sample_id, sealed) in sent:
        assert senders[index].put(sample_id, sealed).status == 201
    folder = ("--folder", site.folder.path)
    assert run_json(capsys, "samples", "get", "--model", "detector", "-o", tmp_path, *folder)["new"] == 3
    assert sorted(read_rows(tmp_path / "selection.csv")) == [f"{number:032x}.jpg" for number in (1, 3, 4)]


def read_rows(path):
    return {row.pop("file_name"): row for row in csv.DictReader(io.StringIO(path.read_text()))}


def test_commands_state_list_and_delete(site, capsys):
    folder = ("--folder", site.folder.path)
    sender, order = site.sender("d1"), site.order()
    for number in (1, 2, 3):
        assert sender.put(*sender.seal(order, number)).status == 201
    assert "3 samples" in run(capsys, "samples", "status", *folder).out
    assert run_json(capsys, "samples", "status", *folder)["by_trigger"] == {"uncertain": 3}
    assert f"{1:032x}" in run(capsys, "samples", "list", "--device", "d1", *folder).out
    assert len(run_json(capsys, "samples", "list", "--trigger", "kept", *folder)) == 0
    assert "which samples" in run(capsys, "samples", "delete", *folder, code=19).err
    assert "1 samples are deleted" in run(capsys, "samples", "delete", f"{1:032x}", *folder).out
    assert run_json(capsys, "samples", "delete", "--device", "d1", *folder) == {"deleted": 2}
    assert (
        "expected N/day"
        in run(capsys, "samples", "start", "--model", "m", "--rate", "5", *folder, code=2).err
    )
    run(capsys, "samples", "off", *folder)
    with site.store.snapshot() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.action.startswith("sample."))).all()
        actions = [row.action for row in rows]
    assert actions == ["sample.on", "sample.start", "sample.delete", "sample.delete", "sample.off"]


def test_roles_and_tokens_without_the_scope_see_no_sample(site):
    from edgekit_fleet.access.principal import SCOPES_OF_ROLE, Principal
    from edgekit_fleet.api.endpoints.table import ENDPOINTS

    needed = {point.path: point.scope for point in ENDPOINTS if point.path.startswith("/samples")}
    assert set(needed.values()) == {"read", "sample", "admin"}
    assert needed["/samples/{name}"] == needed["/samples/delete"] == needed["/samples/orders"] == "sample"
    assert needed["/samples/setting"] == "admin"
    viewer, operator = (Principal(role, SCOPES_OF_ROLE[role]) for role in ("viewer", "operator"))
    assert not viewer.may("sample") and operator.may("sample") and not operator.may("admin")
