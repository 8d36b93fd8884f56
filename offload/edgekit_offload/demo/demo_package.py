"""Creates the package of the demo. Its network is planned on this machine and signed with its own key."""

import datetime
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edgekit_host.emulation.cpu_quota import can_limit_processor
from edgekit_offload.demo.demo_model import INPUT, OUTPUT, make_images, make_model, pick_images, run_model
from edgekit_offload.demo.director import DEVICE_SHARE, PHASES
from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.partition.split import DECODER_SUFFIX, SplitModels, whole_upload
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.plan_inputs import MAX_LOSS, PlanInputs
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import Candidate, PlanningResult
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

_NAME: Final = "demo"
_IMAGES: Final = 24
_REQUESTS: Final = 8
_SAMPLES: Final = 4  # that the plan is made with
_PROFILE_S: Final = 1.0  # on each machine
_MEASURE_S: Final = 1.5  # on each machine
_BANDWIDTHS_MBIT_S: Final = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
_MOST_CUTS: Final = 1  # each plan takes time from the others


@dataclass(frozen=True, slots=True)
class DemoPackage:
    """The package of the demo.

    Attributes:
        keys: The folder of the key pair with which the package is signed.
        requests: The path of a file with the images and their correct answers, see `WorkerConfig`.
        plans: The names of the plans with which edgekit's own choice is compared.
    """

    path: Path
    keys: Path
    requests: Path
    plans: tuple[str, ...]


def make_demo_package(folder: Path, progress: Callable[[str], None]) -> DemoPackage:
    """Create and plan the network of the demo, and package it in `folder`.

    Raises:
        CutError: This machine cannot measure the network.
        OutputError: The folder cannot be written.
    """
    progress("making a network and images")
    images = make_images(_IMAGES)
    content = make_model(images)
    chosen = pick_images(content, images, _REQUESTS)
    requests = folder / "requests.npz"
    np.savez(requests, **{INPUT: chosen, "classes": run_model(content, chosen).argmax(axis=1)})
    feeds = [{INPUT: image[np.newaxis]} for image in chosen[:_SAMPLES]]
    device = Machine.parse(f"local@{100 * DEVICE_SHARE:.0f}%" if can_limit_processor() else "local")
    server = Machine.parse("local")
    progress("profiling the device")
    graph = RunnableGraph(content)
    device_profile = profile_kernels(device, graph, name=_NAME, seconds=_PROFILE_S)
    progress("profiling the server")
    server_profile = profile_kernels(server, graph, name=_NAME, seconds=_PROFILE_S)
    device, server = device.at_speed_of(device_profile), server.at_speed_of(server_profile)
    model = OpenedModel(content)
    cuts = CutMeasurement(
        model=model, feeds=feeds, device=device, server=server, seconds=_MEASURE_S, classes=(OUTPUT,)
    )
    grid = Grid(_BANDWIDTHS_MBIT_S, (PHASES[0].rtt_ms,))
    # Too few samples for `max_loss`: `choose_plans` goes by what the codings change in these few.
    inputs = PlanInputs(
        name=_NAME,
        model=model,
        device=device_profile,
        server=server_profile,
        grid=grid,
        feeds=feeds,
        measure=cuts,
        max_loss=1.0,
    )
    result = plan(inputs, lambda step, _done, _total: progress(step))
    progress("packaging")
    keys = folder / "home" / "keys"
    generate_key(_NAME, keys)
    path, plan_names = _package(folder, content, result, cuts.splits, keys)
    return DemoPackage(path, keys, requests, plan_names)


def _package(
    folder: Path, content: bytes, result: PlanningResult, splits: dict[str, SplitModels], keys: Path
) -> tuple[Path, tuple[str, ...]]:
    """Write the package; return its path and the plans to measure beside edgekit."""
    used: dict[str, SplitModels] = {}
    plans: list[OffloadPlan] = []
    decode: dict[str, dict[str, str]] = {}
    for candidate in choose_plans(result):
        name = candidate.name.partition(":")[0]
        if candidate.kind == "local":
            plans.append(candidate.plan)
            continue
        if candidate.kind == "upload":
            used[name] = whole_upload(content)
            if candidate.plan.media:
                decode[name] = {INPUT: name}
        else:
            used[name] = splits[candidate.name]
        head = None if used[name].head is None else f"{name}.head"
        decoder = None if used[name].decoder is None else f"{name}{DECODER_SUFFIX}"
        plans.append(replace(candidate.plan, head=head, tail=f"{name}.tail", decoder=decoder))
    model = folder / f"{_NAME}.onnx"
    model.write_bytes(content)
    signer = load_signer(_NAME, keys)
    plain = write_plain_package(model, name=_NAME, target="x86-64", folder=folder, sign=signer)
    table = CutTable(tuple(plans), device=result.device.name, server=result.server.name)
    carrying = folder / "offload"
    carrying.mkdir()
    with read_package(plain, TrustStore.from_folder(keys)) as package:
        path = attach_plans(package, used, table, folder=carrying, sign=signer, decode=decode)
    return path, tuple(plan.name for plan in plans)


def choose_plans(result: PlanningResult) -> list[Candidate]:
    """Return the plans to measure: the local one, uploads in image codecs, and the best cut.

    A plan is left out if `is_over_loss` is True or its expected loss exceeds `MAX_LOSS`. Plans that are never
    the best are returned too, because the demo's page compares all plans.
    """
    offered = [
        candidate
        for candidate in result.candidates
        if not candidate.is_over_loss and (candidate.expected_loss or 0.0) <= MAX_LOSS
    ]
    local = [candidate for candidate in offered if candidate.name == LOCAL]
    uploads = [candidate for candidate in offered if candidate.kind == "upload"]
    photos = [candidate for candidate in uploads if candidate.plan.media]
    # At the slow link of the demo, where a cut can pay off.
    column = result.bandwidths_mbit_s.index(min(phase.mbit_s for phase in PHASES))
    cuts = [candidate for candidate in offered if candidate.kind == "cut"]
    cuts = [candidate for candidate in cuts if candidate.in_table] or cuts
    cuts.sort(key=lambda candidate: candidate.latency_ms[0][column])
    return [*local, *(photos or uploads[:1]), *cuts[:_MOST_CUTS]]


def write_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """Write a private key and a self-signed certificate for an IP address.

    The certificate expires after one day.

    Returns:
        The path of the certificate and the path of the key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edgekit demo")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address(host))
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    written = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    private.touch(mode=0o600)
    private.write_bytes(written)
    return certificate, private


def write_token(folder: Path) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return path
