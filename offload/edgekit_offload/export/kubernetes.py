"""Writes manifests for Kubernetes (replicas of our service) and KServe (Triton with the model repository).

Each file is YAML with several documents in plain JSON. A `List` is not used because validators ignore its
items. Models have the same names as in the cut table of the device.

Source: Kubernetes API reference, apps/v1, v1, autoscaling/v2 and policy/v1; KServe API v1beta1 and v1alpha1.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from edgekit_offload.export.service_config import service_config
from edgekit_offload.export.tails import Tail
from edgekit_offload.export.triton import PROCESSOR, Accelerator, TritonBackend, write_repository
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.system.atomic_files import write_atomically, write_text_atomically

_PORT: Final = 8000
_USER: Final = 10001
_SOCKET: Final = "/run/edgekit/edgekit.sock"
_READY: Final = (  # over the Unix socket, which needs no token
    "from edgekit_runtime.client import Client; raise SystemExit(not Client('" + _SOCKET + "').ready())"
)
_LISTEN: Final = {
    "unix_socket": _SOCKET,
    "host": "0.0.0.0",  # noqa: S104  # all addresses of the pod
    "port": _PORT,
    "tls_certificate": "/etc/edgekit/tls/tls.crt",
    "tls_key": "/etc/edgekit/tls/tls.key",
    "token_file": "/etc/edgekit/token/token",
}
_DEVICES: Final = 1024  # devices of a replica. They take at most 256 MiB, a quarter of its limit
_GPU: Final = {"nvidia.com/gpu": "1"}
_CONTAINERFILE: Final = """\
# `edgekit` is the image of deploy/Containerfile.
FROM edgekit
COPY {package} /packages/
COPY keys /keys
USER {user}
"""


def write_manifests(
    package: OpenedPackage,
    tails: tuple[Tail, ...],
    folder: Path,
    backend: TritonBackend,
    accelerator: Accelerator = PROCESSOR,
) -> None:
    """Write `kubernetes.yaml`, `kserve.yaml`, a `Containerfile`, and the model repository for KServe.

    Args:
        package: The package to serve. It is copied to the folder.
        tails: The models for the repository.
        folder: The output folder, created if missing.
        backend: The Triton backend that runs the tails.
        accelerator: The hardware that runs the tails. With a GPU, all containers request a GPU.

    Raises:
        CutError: The backend cannot run a tail.
        OutputError: A file cannot be written.
    """
    name = object_name(package.manifest.name)
    write_repository(tails, folder / "repository", backend, accelerator)
    (folder / "keys").mkdir(exist_ok=True)
    container = _CONTAINERFILE.format(package=package.manifest.file_name, user=_USER)
    with write_atomically(folder / package.manifest.file_name) as file:
        package.copy_to(file)
    write_text_atomically(folder / "Containerfile", container)
    replicas = kubernetes_objects(name, package.manifest, tails, is_on_gpu=accelerator.is_gpu)
    write_text_atomically(folder / "kubernetes.yaml", _join_documents(replicas))
    write_text_atomically(
        folder / "kserve.yaml", _join_documents(kserve_objects(name, is_on_gpu=accelerator.is_gpu))
    )


def object_name(model: str) -> str:
    """Return a Kubernetes name for a model: at most 40 lower-case letters, digits and hyphens."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower())[:40].strip("-")
    return plain if plain[:1].isalpha() else f"model-{plain}".rstrip("-")


def kubernetes_objects(
    name: str, package: Manifest, tails: Sequence[Tail], *, is_on_gpu: bool = False
) -> list[dict[str, Any]]:
    """Return the Deployment, Service, autoscaler, disruption budget and ConfigMap for the replicas."""
    models = [tail.name for tail in tails]
    config = service_config(models, _LISTEN, devices=_DEVICES)
    # Without a cut table the model is served whole.
    container = _container(name, package.version, "--package" if models == [package.name] else "--tails")
    if is_on_gpu:
        container["resources"]["limits"] |= _GPU
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "offload"}
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}
    return [
        _object("v1", "ConfigMap", name, labels, {"data": {"service.toml": config}}),
        _object("apps/v1", "Deployment", name, labels, {"spec": _deployment(name, container, labels)}),
        _object(
            "v1",
            "Service",
            name,
            labels,
            {"spec": {"selector": labels, "ports": [{"name": "https", "port": 443, "targetPort": "https"}]}},
        ),
        _object(
            "autoscaling/v2",
            "HorizontalPodAutoscaler",
            name,
            labels,
            {
                "spec": {
                    "scaleTargetRef": target,
                    "minReplicas": 2,
                    "maxReplicas": 10,
                    "metrics": [{"type": "Resource", "resource": cpu}],
                }
            },
        ),
        _object(
            "policy/v1",
            "PodDisruptionBudget",
            name,
            labels,
            {"spec": {"minAvailable": 1, "selector": {"matchLabels": labels}}},
        ),
    ]


def _container(name: str, version: str, option: str) -> dict[str, Any]:
    """Return the container of a replica; `option` selects the models that it serves."""
    probe = {"exec": {"command": ["python", "-c", _READY]}, "timeoutSeconds": 5, "periodSeconds": 10}
    mounts = {"config": "/etc/edgekit/config", "tls": "/etc/edgekit/tls", "token": "/etc/edgekit/token"}
    return {
        "name": "offload",
        "image": f"{name}-offload:{version}",
        "command": ["edgekit-device", "serve"],
        "args": [option, "/packages", "--keys", "/keys", "--config", "/etc/edgekit/config/service.toml"],
        "ports": [{"name": "https", "containerPort": _PORT}],
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": probe,
        "livenessProbe": {"tcpSocket": {"port": "https"}, "periodSeconds": 10, "failureThreshold": 6},
        "resources": {
            "requests": {"cpu": "1", "memory": "512Mi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": _locked(),
        "volumeMounts": [
            *({"name": volume, "mountPath": path, "readOnly": True} for volume, path in mounts.items()),
            {"name": "run", "mountPath": "/run/edgekit"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the container, where nobody else writes
        ],
    }


def _deployment(name: str, container: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "replicas": 2,
        "selector": {"matchLabels": dict(labels)},
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {"labels": dict(labels)},
            "spec": {
                "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER},
                "terminationGracePeriodSeconds": 40,
                "containers": [container],
                "volumes": [
                    {"name": "config", "configMap": {"name": name}},
                    {"name": "tls", "secret": {"secretName": f"{name}-tls", "defaultMode": 0o440}},
                    {"name": "token", "secret": {"secretName": f"{name}-token", "defaultMode": 0o440}},
                    {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
                    {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
                ],
            },
        },
    }


def kserve_objects(name: str, *, is_on_gpu: bool = False) -> list[dict[str, Any]]:
    """Return a Triton runtime and an inference service, whose models are on the volume NAME-models."""
    labels = {"app.kubernetes.io/name": name}
    ready = {"httpGet": {"path": "/v2/health/ready", "port": 8080}, "periodSeconds": 10}
    container = {
        "name": "kserve-container",
        "image": f"{name}-triton:2.51",
        "command": ["tritonserver"],
        "args": ["--model-repository=/mnt/models", "--http-port=8080", "--allow-grpc=false"],
        "ports": [{"name": "http1", "containerPort": 8080, "protocol": "TCP"}],
        "readinessProbe": ready,
        "livenessProbe": {**ready, "httpGet": {"path": "/v2/health/live", "port": 8080}},
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"memory": "2Gi", **(_GPU if is_on_gpu else {})},
        },
        "securityContext": _locked(),
    }
    runtime = {
        "supportedModelFormats": [{"name": "triton", "version": "2", "autoSelect": False}],
        "protocolVersions": ["v2"],
        "containers": [container],
    }
    model = {
        "modelFormat": {"name": "triton", "version": "2"},
        "runtime": f"{name}-triton",
        "protocolVersion": "v2",
        "storageUri": f"pvc://{name}-models/repository",
    }
    predictor = {"minReplicas": 1, "maxReplicas": 10, "scaleMetric": "cpu", "scaleTarget": 60, "model": model}
    return [
        _object("serving.kserve.io/v1alpha1", "ServingRuntime", f"{name}-triton", labels, {"spec": runtime}),
        _object(
            "serving.kserve.io/v1beta1", "InferenceService", name, labels, {"spec": {"predictor": predictor}}
        ),
    ]


def _locked() -> dict[str, Any]:
    """Return the security context of a container that needs no rights."""
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _object(
    version: str, kind: str, name: str, labels: Mapping[str, str], body: Mapping[str, Any]
) -> dict[str, Any]:
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _join_documents(objects: list[dict[str, Any]]) -> str:
    return "---\n".join(json.dumps(manifest, indent=2) + "\n" for manifest in objects)
