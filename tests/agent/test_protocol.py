import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.wire_schema import check_message

from edgekit_runtime.agent import documents as forms
from edgekit_runtime.agent.signing import key_id, seal, seal_payload, seal_report, unseal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import SignatureError

_ROOT = Path(__file__).parent.parent.parent
_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_KEYS = {key_id(_KEY.public_key()): _KEY.public_key()}
_MODEL = forms.DesiredModel(
    model="kws", version="1.1", manifest_sha256="0" * 64, path="rpi5/kws.edgepkg", size_bytes=3,
    sha256="1" * 64, execution="e-1", release="kws-1.1", rollout="r-1",
    deltas=(forms.DeltaOffer(from_sha256="2" * 64, path="d", size_bytes=1, sha256="3" * 64),),
)  # fmt: skip
_DESIRED = forms.Desired(
    device="cam-1", version=3, issued_at=1.5e9, expires_at=1.6e9, epoch=1, models=(_MODEL,)
)
_SAMPLES = {
    "hello": forms.Hello(device="cam-1", sequence=1, desired_version=0, runtime="0.1.0"),
    "desired": _DESIRED,
    "reported": forms.Reported(
        device="cam-1", sequence=2, status="working", facts={"target": "rpi5"},
        models=(forms.ReportedModel(model="kws", version="1.0", manifest_sha256="4" * 64, health="healthy"),),
        executions=(forms.Execution(execution="e-1", model="kws", version="1.1", state="downloading"),),
        figures=(forms.ModelFigures(model="kws", version="1.0", p50_ms=1.5),),
    ),
    "event": forms.Event(device="cam-1", sequence=3, kind="fallback", text="It crashed.", at=0.0),
}  # fmt: skip


def test_written_protocol_is_that_of_the_dataclasses():
    ran = subprocess.run(
        [sys.executable, _ROOT / "scripts" / "fleet_protocol.py", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("kind", sorted(_SAMPLES))
def test_message_of_each_kind_fits_the_written_protocol_and_comes_back(kind):
    sample = _SAMPLES[kind]
    data = seal(sample, kind, _KEY)
    check_message(forms.topic("cam-1", kind), data)
    assert unseal(data, kind, type(sample), _KEYS, "message") == sample


@pytest.mark.parametrize("kind", sorted(_SAMPLES))
def test_fields_of_a_newer_edgekit_are_left_out(kind):
    sample = _SAMPLES[kind]
    plain = to_plain(sample) | {"mood": "good"}
    for name in ("models", "executions", "figures"):
        for entry in plain.get(name, ()):
            entry["mood"] = {"deep": [1]}
            for delta in entry.get("deltas", ()):
                delta["mood"] = None
    data = seal_payload(encode_json(plain), kind, _KEY)
    assert unseal(data, kind, type(sample), _KEYS, "message") == sample


def test_wrong_value_beside_an_unknown_field_is_refused():
    plain = to_plain(_SAMPLES["reported"]) | {"mood": "good", "status": "happy"}
    with pytest.raises(SignatureError, match="status is 'happy'"):
        unseal(seal_payload(encode_json(plain), "reported", _KEY), "reported", forms.Reported, _KEYS, "m")


def test_message_with_an_unknown_state_does_not_fit_the_written_protocol():
    wrong = forms.Hello(device="cam-1", sequence=1, online="perhaps", runtime="0.1.0")
    with pytest.raises(jsonschema.ValidationError):
        check_message(forms.topic("cam-1", "hello"), seal(wrong, "hello", _KEY))


def test_changed_payload_is_refused():
    data = seal(_DESIRED, "desired", _KEY)
    other = seal(_SAMPLES["event"], "event", _KEY)
    for wrong in (
        data[:-3],
        data.replace(b"desired", b"reported"),
        other,
        b"[]",
        b"{" * 33_000,
        b"[" * 32_000,
    ):
        with pytest.raises(SignatureError):
            unseal(wrong, "desired", forms.Desired, _KEYS, "message")


def test_document_of_a_foreign_key_is_refused_and_its_key_is_named():
    stranger = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with pytest.raises(SignatureError, match=key_id(stranger.public_key())):
        unseal(seal(_DESIRED, "desired", stranger), "desired", forms.Desired, _KEYS, "message")


def make_report(models, sequence):
    names = [f"model-of-the-camera-{number:02}" for number in range(models)]
    return forms.Reported(
        device="camera-0001", sequence=sequence, status="working", facts={"target": "jetson-orin-nano"},
        models=tuple(
            forms.ReportedModel(
                model=name, version="1.10.2", manifest_sha256="4" * 64, health="healthy", previous="1.10.1"
            )
            for name in names
        ),
        executions=tuple(
            forms.Execution(execution=f"release-of-december-r1.1.{number:024}", model=name, version="1.10.3",
                            state="succeeded", done_bytes=4_000_000, sent_bytes=4_000_000)
            for number, name in enumerate(names)
        ),
        figures=tuple(
            forms.ModelFigures(
                model=name, version=version, requests=1_000_000, looked_at=1_000_000, answer_s=12_345.678901,
                p50_ms=12.345678901234, p99_ms=23.456789012345, energy_mj=34.56789012, agreement=0.9876543,
                compared=100_000, drift=0.012345678901234,
            )
            for name in names for version in ("1.10.2", "1.10.3")
        ),
    )  # fmt: skip


def read_report(models, sequence):
    data = seal_report(make_report(models, sequence), _KEY)
    return unseal(data, "reported", forms.Reported, _KEYS, "message")


def test_report_of_twenty_models_on_trial_holds_all_figures():
    assert len(read_report(20, 1).figures) == 40


def test_figures_that_do_not_fit_follow_in_later_reports():
    found = set()
    for sequence in range(1, 81, 10):
        report = read_report(40, sequence)
        assert len(report.executions) == len(report.models) == 40
        found |= {(one.model, one.version) for one in report.figures}
    assert len(found) == 80


def test_desired_document_of_twenty_five_models_fits():
    models = tuple(replace(_MODEL, model=f"model-of-the-camera-{number}") for number in range(25))
    seal(replace(_DESIRED, models=models), "desired", _KEY)


def test_document_over_the_limit_is_not_sealed():
    with pytest.raises(ValueError, match="at most 32768"):
        seal(forms.Event(device="a", sequence=1, kind="k", text="x" * 32_000, at=0.0), "event", _KEY)
