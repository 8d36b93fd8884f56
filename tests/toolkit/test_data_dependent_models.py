"""Generated models whose shapes are decided by data go through package, verify and serve.

`EDGEKIT_SEEDS` is the number of members of each kind.
"""

import contextlib
import http.client
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.service.serve_parts import Served, served
from tests.toolkit.data_dependent_models import KINDS, Member, member_of
from tests.toolkit.package_run import edgekit, isolated_home, package, read_only, saved, stored

from edgekit_runtime import Client, open_session
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.sessions.selftest import read_golden_inputs

SEEDS = range(int(os.environ.get("EDGEKIT_SEEDS", "1")))
DETECTORS = {"end_to_end", "four_outputs", "raw_detector"}
LONG = {"four_outputs", "suppressed", "found_rows"}


def packaged(folder: Path, member: Member, *options: object) -> dict[str, Any]:
    """Package a member in `folder`, where a service looks for keys and package; return the report."""
    model, data = saved(member.model(), folder / "linear.onnx"), stored(folder / "data.npz", member.samples)
    outcome = package(
        model,
        folder / "out",
        "--calibration",
        data,
        "--search-seconds",
        0.3,
        "--budget",
        "size=10MB,drop=100%",
        "--json",
        *options,
    )
    assert outcome.code == 0, outcome.stdout[-500:] + outcome.stderr[-500:]
    return outcome.json


def ask(service: Served, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request in JSON."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = service.connect()
    tensors = [
        {
            "name": name,
            "datatype": DATATYPE_OF_DTYPE[value.dtype.name],
            "shape": value.shape,
            "data": value.reshape(-1).tolist(),
        }
        for name, value in inputs.items()
    ]
    body = {"inputs": tensors}
    connection.request("POST", "/v2/models/linear/infer", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS]
)
def test_model_whose_shapes_depend_on_data_is_packaged_proved_and_served(
    tmp_path: Path, kind: str, seed: int
) -> None:
    with isolated_home(tmp_path):
        report = packaged(tmp_path, member_of(kind, seed))
        evaluation = report["data"]["evaluation"]
        assert evaluation["baseline"] == pytest.approx(1)
        assert (evaluation["metric"] == "detections") == (kind in DETECTORS) or kind == "suppressed"
        (path,) = (tmp_path / "out").glob("*.edgepkg")
        assert edgekit("verify", path).code == 0
        with read_only(tmp_path / "out") as opened, contextlib.closing(open_session(path)) as session:
            inputs = read_golden_inputs(opened)
            expected = session.run(inputs)
        path.rename(tmp_path / "linear.edgepkg")
        with served(tmp_path) as service:
            with Client(str(service.socket_path)) as client:
                answer = client.infer("linear", inputs)
            spoken = ask(service, inputs)
            assert service.end()[0] == 0
    for name, value in expected.items():
        np.testing.assert_array_equal(answer[name], value)
        assert spoken[name][0] == list(value.shape)
        np.testing.assert_allclose(np.array(spoken[name][1], value.dtype), value.reshape(-1), rtol=1e-6)
