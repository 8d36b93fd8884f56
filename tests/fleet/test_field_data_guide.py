"""The commands of docs/guide/field-data.md, in their order, on a fleet in this process.

Devices send photographs of digits, of which those that a model is less sure of are drawn more often. The test
labels them as a person would.
"""

import csv
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.fleet.sample_site import SampleSite
from tests.toolkit.package_run import TINY, edgekit, isolated_home

pytest.importorskip("onnxruntime")

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "field-data.md"
PREPROCESSING = {"colour": "L", "scale": 1 / 255, "layout": "NCHW"}


def read_commands():
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def send_digits(site, order, count):
    """Send photographs of digits from two devices; returns identifier -> digit."""
    senders = [site.sender(name, tags={"site": "lyon"}) for name in ("d1", "d2")]
    with np.load(TINY / "digits_cnn.eval.npz") as arrays:
        pictures, digits = arrays["image"], arrays["y"]
    answers = {}
    for number in range(count):
        output = io.BytesIO()
        Image.fromarray((pictures[number, 0] * 255).astype(np.uint8)).save(output, "PNG")
        sample_id, sealed = senders[number % 2].seal(
            order,
            number + 1,
            content=output.getvalue(),
            media_type="image/png",
            probability=(0.5, 0.05)[number % 3 == 0],
            answer={"classes": [{"label": str(digits[number]), "score": 0.5}]},
        )
        assert senders[number % 2].put(sample_id, sealed).status == 201
        answers[f"{sample_id}.png"] = str(digits[number])
    return answers


def fill_in_labels(path, answers):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    lines = ["file_name,label,suggestion"]
    for index, row in enumerate(rows):
        assert row["suggestion"] == answers[row["file_name"]]
        label = answers[row["file_name"]] if index % 3 else ""
        lines.append(f"{row['file_name']},{label},{row['suggestion']}")
    path.write_text("\n".join(lines) + "\n")


def test_commands_of_the_guide_lead_from_an_order_to_a_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGEKIT_FLEET", str(tmp_path / "fleet"))
    commands = read_commands()
    assert [command[2] for command in commands[:-1]] == [
        "on",
        "start",
        "status",
        "list",
        *["delete"] * 2,
        "get",
    ]
    switch_on, start, status, list_, delete, delete_old, get, package = commands
    with SampleSite(tmp_path / "fleet").serve(requests=10**6) as site:
        for command in (switch_on, start):
            assert edgekit(*command).code == 0
        order = json.loads(edgekit(*status, "--json").stdout)["orders"][0]
        assert (order["model"], order["per_day"], order["state"]) == ("detector", 20.0, "active")
        ordered = type("Order", (), {"id": order["id"], "model": "detector"})
        answers = send_digits(site, ordered, 60)
        assert "60 samples" in edgekit(*status).stdout
        assert edgekit(*list_).code == 0
        assert "0 samples" in edgekit(*delete_old).stdout
        assert "60 new samples" in edgekit(*get).stdout
        fill_in_labels(tmp_path / "field" / "labels.csv", answers)
        assert "30 samples are deleted" in edgekit(*delete).stdout
    (tmp_path / "detector.onnx").write_bytes((TINY / "digits_cnn.onnx").read_bytes())
    (tmp_path / "preprocessing.json").write_text(json.dumps(PREPROCESSING))
    (tmp_path / "labels.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    shorter = ("--backend", "ort", "--threads", "1", "--search-seconds", "0", "--json")
    with isolated_home(tmp_path / "home"):
        outcome = edgekit(*package, *shorter)
    assert outcome.code == 0, outcome
    report = outcome.json
    evaluation = report["data"]["evaluation"]
    assert (evaluation["metric"], evaluation["samples"], evaluation["field_samples"]) == ("top1", 40, 40)
    assert report["data"]["calibration"]["samples"] == 20
    notes = " ".join(report["warnings"])
    assert "40 of 40 evaluation samples come from the field" in notes
    assert "over all requests, " in notes
