"""`edgekit export`: converts a package to formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.shared_options import as_json_option, keys_folder_option


@click.command("export")
@click.argument("package", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(["onnx", "tflite", "ort-model-package", "android", "oci"]),
    help="Format to write.",
)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("exports"),
    show_default=True,
    help="Folder to write to.",
)
@keys_folder_option()
@as_json_option
def command(package: Path, *, form: str, folder: Path, keys_folder: Path | None, as_json: bool) -> None:
    """Verify PACKAGE, and write it in a format of another tool.

    The formats onnx and tflite are the model files of the package. The format ort-model-package contains the
    ONNX models as the variants of one component. The format android is a folder for an app, with Kotlin code
    that prepares inputs and reads outputs. The format oci is an artifact with the whole package, and only
    this format keeps the signature.

    The command fails if no trusted key has signed PACKAGE, or if the format does not support its models.
    """
    import json

    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore
    from edgekit_toolkit.packaging.export_formats import FORMATS

    with read_package(package, TrustStore.from_folder(keys_folder or find_keys_folder())) as opened:
        paths = FORMATS[form].write(opened, folder)
    if as_json:
        click.echo(json.dumps({"format": form, "written": [str(path) for path in paths]}))
        return
    for path in paths:
        click.echo(f"written: {path}")
