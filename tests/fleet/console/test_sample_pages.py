"""Pages of samples: who sees them, what goes to a browser of what devices sent, and deletion."""

import base64
import io
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import select
from tests.fleet.console.conftest import Served, log_in

from edgekit_fleet.console.sample_content import render_content
from edgekit_fleet.operations import samples
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.tables import AuditRow, DeviceRow, SampleRow
from edgekit_runtime.encryption.key_wrapping import seal
from edgekit_runtime.preprocessing.wav import read_wav, write_wav
from edgekit_runtime.protocol.samples import Sample, SampleHeader, SampleTensor, sample_info, write_sample


def make_picture(width=640, height=480, form="JPEG"):
    output = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(output, form)
    return output.getvalue()


def make_sample(number=1, content=b"", media_type="image/jpeg", answer=None, **changes):
    fields = {
        "id": f"{number:032x}",
        "order": "s-1",
        "model": "detector",
        "version": "1.0.0",
        "package_sha256": "a" * 64,
        "taken_at": 1.7e9,
        "triggers": ("uncertain",),
        "probability": 0.25,
        "media_type": media_type,
        **changes,
    }
    return Sample(header=SampleHeader(**fields), input=content, answer=answer or {})


class Collection:
    """The samples of a served console."""

    def __init__(self, served: Served) -> None:
        self.store, console = served.store, served.console
        self.vault = SampleVault(console.folder, console.settings)
        samples.switch(self.store, self.vault, is_on=True, days=30, max_bytes=1 << 30, actor="ada")
        with self.store.snapshot() as session:
            self.device = session.scalars(select(DeviceRow.name)).first()

    def add(self, sample: Sample) -> str:
        header = sample.header
        point = base64.b64decode(self.vault.make_key())
        sealed = seal(write_sample(sample), point, sample_info(header.id))
        self.vault.put(header.id, sealed)
        with self.store.transaction() as session:
            session.add(
                SampleRow(
                    id=header.id,
                    device=self.device,
                    order=header.order,
                    model=header.model,
                    version=header.version,
                    triggers=f" {' '.join(header.triggers)} ",
                    probability=header.probability,
                    media_type=header.media_type,
                    size_bytes=len(sealed),
                    taken_at=header.taken_at,
                    received_at=1.7e9 + int(header.id, 16),
                )
            )
        return header.id


@pytest.fixture
def collection(served: Served) -> Collection:
    return Collection(served)


def list_actions(collection):
    with collection.store.snapshot() as session:
        statement = select(AuditRow).where(AuditRow.action.startswith("sample.")).order_by(AuditRow.number)
        return [(row.actor, row.action) for row in session.scalars(statement)]


def test_page_shows_pictures_sounds_and_counts_and_the_audit_log_says_to_whom(collection, served):
    picture = collection.add(make_sample(1, make_picture(), answer={"top": [{"label": "cat"}]}))
    sound = collection.add(make_sample(2, write_wav(np.zeros(800), 8000), "audio/wav", triggers=("kept",)))
    client = log_in(served, "olaf")
    page = client.get("/samples").text
    assert f'src="/samples/{picture}/content?size=small"' in page
    assert f'<audio controls preload="none" src="/samples/{sound}/content' in page
    assert ">uncertain <span>1</span>" in page
    assert list_actions(collection)[1:] == [("olaf", "sample.view")]
    answer = client.get(f"/samples/{picture}/content?size=small")
    assert answer.headers["content-type"] == "image/jpeg"
    assert list_actions(collection)[1:] == [("olaf", "sample.view")]
    client.get(f"/samples/{picture}")
    other = log_in(served, "maria")
    other.get(f"/samples/{sound}/content")
    assert list_actions(collection)[2:] == [("olaf", "sample.read"), ("maria", "sample.read")]
    assert picture not in client.get("/samples?trigger=kept").text
    assert "cat" in client.get(f"/samples/{picture}").text


def test_viewer_sees_counts_and_no_sample(collection, served):
    sample_id = collection.add(make_sample(1, make_picture()))
    client = log_in(served, "vera")
    page = client.get("/samples")
    assert (page.status, sample_id in page.text) == (200, False)
    assert "1 from the field" in page.text
    for path in (f"/samples/{sample_id}", f"/samples/{sample_id}/content"):
        assert client.get(path).status == 403
    assert client.post(f"/samples/{sample_id}/delete").status == 403
    assert client.post("/samples/setting", action="off", days="30").status == 403
    assert log_in(served, "olaf").post("/samples/setting", action="off", days="30").status == 403


def test_samples_are_deleted_one_and_by_filter(collection, served):
    first, second, third = (
        collection.add(make_sample(number, b"x", model=model))
        for number, model in ((1, "detector"), (2, "detector"), (3, "keywords"))
    )
    client = log_in(served, "olaf")
    assert client.post("/samples/delete", model="", device="").status == 422
    client.post(f"/samples/{first}/delete")
    assert "1 samples are deleted" in client.follow(client.post("/samples/delete", model="detector")).text
    page = client.get("/samples").text
    assert (second in page, third in page) == (False, True)


def test_switch_is_an_administrators(served):
    client = log_in(served, "maria")
    assert "collects no samples" in client.get("/samples").text
    assert client.post("/samples/setting", action="on", days="soon").status == 422
    assert (
        "collects samples now" in client.follow(client.post("/samples/setting", action="on", days="30")).text
    )


def test_hostile_words_of_a_sample_stay_text(collection, served):
    script = "<script>alert(1)</script>"
    answer = {"top": [{"label": script}]}
    sample_id = collection.add(make_sample(1, b"<svg onload='alert(1)'/>", version=script, answer=answer))
    client = log_in(served, "olaf")
    for path in ("/samples", f"/samples/{sample_id}"):
        assert "<script>alert" not in client.get(path).text
    content = client.get(f"/samples/{sample_id}/content")
    assert content.headers["content-type"] == "image/svg+xml"
    assert "onload" not in content.text
    assert content.headers["content-security-policy"].startswith("default-src 'none'")


def test_picture_is_made_anew_and_small():
    hidden = make_picture(2000, 1000) + b"<script>"
    content = render_content(make_sample(content=hidden), 320)
    assert Image.open(io.BytesIO(content.data)).size == (320, 160)
    assert b"<script>" not in content.data


def test_bombs_and_broken_content_become_a_sentence():
    bomb = bytearray(make_picture(64, 64, "PNG"))
    bomb[16:24] = (30_000).to_bytes(4, "big") * 2
    tensor = SampleTensor(name="x", dtype="float32", shape=(1 << 40, 1 << 40))
    odd = SampleTensor(name="x", dtype="<script>", shape=(1,))
    poisoned = [
        make_sample(content=bytes(bomb), media_type="image/png"),
        make_sample(content=make_picture()[:500]),
        make_sample(content=b"", media_type="image/webp"),
        make_sample(content=b"RIFF", media_type="audio/wav"),
        make_sample(content=b"", media_type="text/html"),
        make_sample(content=b"1", media_type="video/x-raw; width=999999; height=999999"),
        make_sample(content=b"", media_type="", tensors=(tensor,)),
        make_sample(content=b"1234", media_type="", tensors=(odd,)),
        make_sample(content=np.full(4, np.nan, "<f4").tobytes(), media_type="", tensors=(tensor,)),
    ]
    for sample in poisoned:
        content = render_content(sample, 320)
        assert content.media_type == "image/svg+xml"
        assert b"<text" in content.data and b"<script" not in content.data


def test_sound_is_cut_and_made_anew():
    content = render_content(
        make_sample(content=write_wav(np.ones(8000 * 70), 8000), media_type="audio/wav"), 1
    )
    amplitudes, rate = read_wav(content.data)
    assert (content.media_type, rate, len(amplitudes)) == ("audio/wav", 8000, 60 * 8000)


def test_tensor_is_a_line():
    tensor = SampleTensor(name="x", dtype="int16", shape=(1, 1000))
    values = np.arange(1000, dtype="<i2").tobytes()
    content = render_content(make_sample(content=values, media_type="", tensors=(tensor,)), 320)
    assert content.data.count(b",") == 320 and b"<polyline" in content.data


def test_a_page_of_large_tensors_takes_the_memory_of_one():
    tensor = SampleTensor(name="x", dtype="uint8", shape=(2_000_000,))
    sample = make_sample(content=bytes(2_000_000), media_type="", tensors=(tensor,))
    peaks = []
    for count in (1, 6):
        tracemalloc.start()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(render_content, [sample] * 2 * count, [320] * 2 * count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_answer_of_a_sample_is_shown_as_json(collection, served):
    answer = {"values": [1.5], "deep": {"a": ["b"]}}
    sample_id = collection.add(make_sample(1, make_picture(), answer=answer))
    page = log_in(served, "olaf").get(f"/samples/{sample_id}").text
    assert json.dumps(answer, indent=2, sort_keys=True).replace('"', "&#34;") in page
