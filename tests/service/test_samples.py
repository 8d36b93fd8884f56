"""Samples from the field in the service: drawn, looked at, sealed, and forbidden by the owner."""

import base64
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import draw, encode, post, write_cell_detector
from tests.service.service_parts import Running, ask, infer_bytes, make_config, post_bytes, running
from tests.waiting import wait_for

from edgekit_runtime.client.control import read_samples
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.encryption.key_wrapping import encode_point, make_exchange, unseal
from edgekit_runtime.preprocessing.wav import read_wav
from edgekit_runtime.protocol.samples import Sample, SampleOrder, SampleTrigger, read_sample, sample_info
from edgekit_runtime.samples.folder import SampleFolder
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import SampleOptions
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.samples.sampler import Writer
from edgekit_runtime.service.samples.served_request import ServedRequest, write_wav

KEY = ec.generate_private_key(ec.SECP256R1())
POINT = encode_point(KEY.public_key())


def make_order(*kinds: str, model: str = "cells", **changes: Any) -> SampleOrder:
    stated: dict[str, Any] = {
        "id": f"o-{model}",
        "model": model,
        "triggers": tuple(SampleTrigger(kind=kind) for kind in kinds),
        "per_day": 1000.0,
        "max_bytes": 10 << 20,
        "ends_at": time.time() + 3600,
        "public_key": base64.b64encode(POINT).decode(),
    }
    return SampleOrder(**{**stated, **changes})


class Site:
    """A service whose samples this test orders and opens."""

    def __init__(self, service: Running, folder: Path) -> None:
        self.service, self.file = service, folder / "samples.json"
        self.samples = SampleFolder(folder / "samples")

    def order(self, *orders: SampleOrder) -> None:
        self.file.write_text(json.dumps({"orders": [to_plain(order) for order in orders]}))
        os.utime(self.file, ns=(0, time.monotonic_ns()))
        self.look()

    def look(self) -> None:
        self.service.call(self.service.service.follow_samples)

    def draw_next(self, *probabilities: float, model: str = "cells") -> None:
        """Let the next request be drawn, each line with its probability."""

        def set_draws() -> None:
            sampler: Any = self.service.service.registry.models.find(model, None).sampler
            sampler.draws.refresh(time.monotonic())
            sampler.draws.countdown = 1
            for line, probability in zip(sampler.draws.lines, probabilities, strict=True):
                line.probability = probability

        self.service.call(set_draws)

    def open_samples(self, count: int) -> list[Sample]:
        wait_for(lambda: len(self.samples.list_samples()) >= count, f"{count} samples")
        stored = self.samples.list_samples()
        assert len(stored) == count
        return [self.open(sample.path) for sample in stored]

    def open(self, path: Path) -> Sample:
        sample_id = path.name.rpartition(".")[2]
        sample = read_sample(unseal(path.read_bytes(), make_exchange(KEY), POINT, sample_info(sample_id)))
        assert sample.header.id == sample_id
        return sample

    def state(self, order: str = "o-cells") -> Any:
        return read_samples(Path(self.service.socket_path))["orders"][order]


@pytest.fixture
def make_site(maker: PackageMaker, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    paths = [tmp_path / "cells.edgepkg", tmp_path / "linear.edgepkg"]
    write_cell_detector(maker, paths[0])
    maker.write(paths[1])
    open_services = []

    def make(**options: Any) -> Site:
        options = {"file": str(tmp_path / "samples.json"), **options}
        here = {"cells": ModelOptions(isolated=False)}
        config = make_config(tmp_path, samples=SampleOptions(**options), models=here)
        manager = running(config, PackageFiles(paths, maker.trust))
        open_services.append(manager)
        return Site(manager.__enter__(), tmp_path)

    yield make
    for manager in open_services:
        manager.__exit__(None, None, None)


SURE = 1 - 1e-12


def test_a_photograph_is_kept_as_it_came_with_its_answer(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.order(make_order("random", "uncertain"))
    site.draw_next(SURE, 0.25)
    picture = encode(draw(red=(2, 1)), "JPEG")

    status, answer = post(site.service, picture, "image/jpeg")

    (sample,) = site.open_samples(1)
    header = sample.header
    assert status == 200
    assert (sample.input, header.media_type, header.model, header.version) == (
        picture,
        "image/jpeg",
        "cells",
        "1.0.0",
    )
    assert sample.answer["detections"] == answer["detections"]
    assert header.triggers == ("random",)
    assert header.probability == pytest.approx(1)
    assert abs(header.taken_at - time.time()) < 600
    wait_for(lambda: site.state()["triggers"] == {"random": 1, "uncertain": 0}, "the count")
    assert picture[100:132] not in site.samples.list_samples()[0].path.read_bytes()


def test_tensors_are_kept_with_their_outputs(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.order(make_order("random", model="linear"))
    site.draw_next(0.5, model="linear")
    x: Any = np.arange(8, dtype=np.float32).reshape(2, 4)
    while not site.samples.list_samples():
        site.draw_next(SURE, model="linear")
        reply = ask(site.service, infer_bytes(x))
        wait_for(lambda: site.state("o-linear")["triggers"]["random"] > 0, "the sample")

    sample = site.open_samples(1)[0]
    (tensor,) = sample.header.tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x", "float32", (2, 4))
    assert np.frombuffer(sample.input, np.float32).tolist() == x.ravel().tolist()
    assert reply.status == 200
    assert np.shape(sample.answer["outputs"]["y"]) == (2, 2)


def test_frames_and_sound_of_streams_are_kept_as_files(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.order(make_order("random"))
    site.draw_next(SURE)
    pixels = draw(red=(1, 1))
    height, width = pixels.shape[:2]

    post(site.service, pixels.tobytes(), f"video/x-raw; format=RGB; width={width}; height={height}")

    (sample,) = site.open_samples(1)
    assert sample.header.media_type == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(sample.input))), pixels)
    sound = np.array([0.5, -0.25], np.float32)
    samples, rate = read_wav(write_wav(sound.tobytes(), {"format": "F32LE", "rate": "16000"}))
    assert (samples.tolist(), rate) == ([0.5, -0.25], 16_000)


def test_an_application_keeps_the_last_request_or_one_by_its_id(make_site: Callable[..., Site]) -> None:
    site = make_site()
    assert ask(site.service, post_bytes("/v2/models/cells/keep", b"")).status == 409
    site.order(make_order("kept"), make_order("kept", model="linear", id="o-2", per_day=2.0))
    assert ask(site.service, post_bytes("/v2/models/cells/keep", b"")).status == 404
    pictures = [encode(draw(red=(column, 1)), "PNG") for column in (1, 3)]
    for picture in pictures:
        post(site.service, picture)
    x: Any = np.ones((1, 4), np.float32)
    for name in ("a", "b", "c"):
        ask(site.service, infer_bytes(x * ord(name), id=name))

    kept = ask(site.service, post_bytes("/v2/models/cells/keep", b""))
    named = ask(site.service, post_bytes("/v2/models/linear/keep", b'{"id": "b"}'))

    samples = {sample.header.id: sample for sample in site.open_samples(2)}
    assert samples[kept.json["sample"]].input == pictures[1]
    assert samples[kept.json["sample"]].header.triggers == ("kept",)
    assert samples[kept.json["sample"]].header.probability == 1
    assert np.frombuffer(samples[named.json["sample"]].input, np.float32).tolist() == [98.0] * 4
    assert ask(site.service, post_bytes("/v2/models/linear/keep", b'{"id": "z"}')).status == 404
    assert ask(site.service, post_bytes("/v2/models/linear/keep", b"{}")).status == 200
    assert ask(site.service, post_bytes("/v2/models/linear/keep", b"{}")).status == 429
    assert ask(site.service, post_bytes("/v2/models/none/keep", b"")).status == 404


def test_a_request_that_is_drawn_and_kept_has_one_time(make_site: Callable[..., Site]) -> None:
    """By it the fleet sees that both samples are of one request."""
    site = make_site()
    site.order(make_order("random", "kept"))
    site.draw_next(SURE, 0)
    post(site.service, encode(draw(red=(2, 1)), "JPEG"))

    assert ask(site.service, post_bytes("/v2/models/cells/keep", b"")).status == 200

    headers = [sample.header for sample in site.open_samples(2)]
    assert sorted(header.triggers for header in headers) == [("kept",), ("random",)]
    assert len({header.taken_at for header in headers}) == 1


def test_the_owner_forbids_and_what_waits_is_deleted(make_site: Callable[..., Site], tmp_path: Path) -> None:
    before = SampleFolder(tmp_path / "samples")
    before.write("cells", ("o-cells", "random"), "a" * 32, b"sealed")
    site = make_site(allow=False)
    site.order(make_order("random", "kept"))

    assert site.service.service.registry.models.find("cells", None).sampler is None
    post(site.service, encode(draw(red=(1, 1))))
    assert ask(site.service, post_bytes("/v2/models/cells/keep", b"")).status == 409
    wait_for(lambda: site.samples.list_samples() == [], "the deletion")
    assert read_samples(Path(site.service.socket_path)) == {"allowed": False, "orders": {}}


def test_an_order_ends_and_a_removed_one_is_followed_no_more(make_site: Callable[..., Site]) -> None:
    site = make_site()
    models = site.service.service.registry.models
    assert models.find("cells", None).sampler is None
    site.order(make_order("random"), make_order("random", id="o-2", ends_at=1.0))
    assert list(models.find("cells", None).to_json()["samples"]) == ["o-cells"]
    site.order()
    assert models.find("cells", None).sampler is None
    site.order(make_order("random"))
    site.file.write_text("{")
    os.utime(site.file, ns=(0, 1))
    site.look()
    assert models.find("cells", None).sampler is not None
    site.file.unlink()
    site.look()
    assert models.find("cells", None).sampler is None


def test_what_a_device_cannot_do_is_stated(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.order(make_order("of-the-future", "drift", "random"))
    site.draw_next(0.0, SURE, 0.0)
    post(site.service, encode(draw(red=(1, 1))))
    wait_for(lambda: "drift" in site.state()["error"], "the look")
    assert "knows no trigger 'of-the-future'" in site.state()["error"]
    assert site.samples.list_samples() == []


def test_a_sample_beyond_the_limit_is_dropped_and_counted(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.order(make_order("random", max_sample_bytes=100))
    site.draw_next(SURE)
    post(site.service, encode(draw(red=(1, 1)), "BMP"), "image/bmp")
    assert site.state()["dropped"] == 1
    site.order(make_order("random", max_bytes=500))
    site.draw_next(SURE)
    post(site.service, encode(draw(red=(1, 1)), "BMP"), "image/bmp")
    wait_for(lambda: site.state()["dropped"] == 2, "the count")
    site.draw_next(SURE)  # the next one is not even drawn
    site.look()
    site.service.call(lambda: None)
    lines = site.service.service.registry.models.find("cells", None).sampler.draws.lines
    assert [line.has_room for line in lines] == [False]
    assert site.samples.list_samples() == []


def test_a_model_of_a_process_of_its_own_keeps_its_samples_itself(
    maker: PackageMaker, tmp_path: Path
) -> None:
    path = tmp_path / "linear.edgepkg"
    maker.write(path)
    config = make_config(
        tmp_path,
        samples=SampleOptions(file=str(tmp_path / "samples.json")),
        models={"linear": ModelOptions(isolated=True)},
    )
    with running(config, PackageFiles([path], maker.trust)) as service:
        site = Site(service, tmp_path)
        site.order(make_order("kept", model="linear"))
        wait_for(lambda: "o-linear" in read_samples(Path(service.socket_path))["orders"], "the worker's word")
        x: Any = np.ones((1, 4), np.float32)
        assert ask(service, infer_bytes(x)).status == 200
        reply = ask(service, post_bytes("/v2/models/linear/keep", b""))
        assert reply.status == 200
        assert [sample.header.id for sample in site.open_samples(1)] == [reply.json["sample"]]
        wait_for(lambda: site.state("o-linear")["triggers"] == {"kept": 1}, "the count")


@pytest.mark.parametrize("kind", ["trial", "server"])
def test_another_version_or_the_model_here_has_a_say(kind: str) -> None:
    spec = SimpleNamespace(name="y", dtype="float32", shape=("N", 2))
    manifest = SimpleNamespace(states=(), outputs=(spec,), figures={"class_output": "y"})
    other = SimpleNamespace(run=lambda inputs: {"y": np.array([[inputs["x"], 0.5]], np.float32)})
    session = SimpleNamespace(local=other) if kind == "server" else SimpleNamespace()
    served: Any = SimpleNamespace(
        loaded=SimpleNamespace(manifest=manifest, answerer=None, instances=(session,)), trial=None
    )
    if kind == "trial":
        candidate = SimpleNamespace(loaded=SimpleNamespace(instances=(other,), answerer=None))
        served.trial = SimpleNamespace(current=served, candidate=candidate)
    outputs: Any = {"y": np.array([[0.9, 0.1]], np.float32)}

    def ask(x: float) -> float | None:
        inputs: Any = {"x": x}
        return ServedRequest(served=served, inputs=inputs, outputs=outputs).observe().find_agreement()

    assert (ask(0.8), ask(0.2)) == (1.0, 0.0)
    served.trial, session.local = None, None
    assert ask(0.2) is None


def test_a_flood_of_samples_is_dropped_beyond_the_queue() -> None:
    writer, begun, go_on = Writer(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    assert writer.put(1, hold)
    assert begun.wait(60)
    assert [writer.put(1, lambda: None) for _ in range(9)] == [True] * 8 + [False]
    go_on.set()
    assert writer.close()
    assert writer.put(40 << 20, hold)  # one of any size
    assert not writer.put(1, hold)
