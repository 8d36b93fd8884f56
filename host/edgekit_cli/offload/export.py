"""`edgekit offload export`: writes the server part of a package for Triton, Kubernetes, KServe or HAProxy."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.offload import insecure_option
from edgekit_cli.shared_options import as_json_option, keys_folder_option


@click.command("export")
@click.argument("package", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(["triton", "kserve", "haproxy"]),
    help="Format to write.",
)
@click.option(
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write.",
)
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "python"]),
    default="onnxruntime",
    show_default=True,
    help="Triton backend that runs the tails. Photographs and sound need python.",
)
@click.option("--gpu", is_flag=True, help="With triton or kserve: run the tails on an NVIDIA GPU.")
@click.option(
    "--tensorrt",
    is_flag=True,
    help="With triton or kserve: run the tails on an NVIDIA GPU with TensorRT, within Triton's onnxruntime"
    " backend, which builds each tail at its start.",
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="URL",
    help="With haproxy: HOST:PORT or https://HOST:PORT of a replica of `edgekit offload serve`. May be"
    " repeated.",
)
@insecure_option
@keys_folder_option()
@as_json_option
def command(
    package: Path,
    *,
    form: str,
    folder: Path,
    backend: str,
    gpu: bool,
    tensorrt: bool,
    replicas: tuple[str, ...],
    insecure: bool,
    keys_folder: Path | None,
    as_json: bool,
) -> None:
    """Write the models that PACKAGE needs on a server, for servers other than `edgekit offload serve`.

    triton writes a model repository. kserve writes manifests for Kubernetes and KServe. haproxy writes a
    configuration for replicas of `edgekit offload serve`. The device needs no change, because the model names
    stay the same.
    """
    import json

    from edgekit_offload.export.haproxy import write_haproxy
    from edgekit_offload.export.kubernetes import write_manifests
    from edgekit_offload.export.tails import find_tails
    from edgekit_offload.export.triton import Accelerator, TritonBackend, write_repository
    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore

    accelerator = Accelerator(is_gpu=gpu or tensorrt, has_tensorrt=tensorrt)
    if form == "haproxy" and accelerator.is_gpu:
        raise click.UsageError("--gpu and --tensorrt are for triton and kserve; HAProxy runs no model")
    chosen: TritonBackend = "python" if backend == "python" else "onnxruntime"
    with read_package(package, TrustStore.from_folder(keys_folder or find_keys_folder())) as opened:
        tails = find_tails(opened)
        if form == "triton":
            write_repository(tails, folder, chosen, accelerator)
        elif form == "kserve":
            write_manifests(opened, tails, folder, chosen, accelerator)
        else:
            write_haproxy(tails, folder, replicas, insecure=insecure)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "models": [tail.name for tail in tails]}))
        return
    for tail in tails:
        how = "joins requests" if tail.is_batched else "one request at a time"
        click.echo(f"{tail.name}: {how}")
    click.echo(f"written to {folder}; docs/guide/offload-export.md says how to use it")
