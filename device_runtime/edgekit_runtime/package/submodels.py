"""A submodel: a part of a package's model that runs by itself, on the device or on a server.

A head runs on the device, and its tail on a server. The outputs of a head are exactly the inputs of its tail.
If tensors are sent as 8-bit or 4-bit codes, the head's graph encodes them and the tail's graph decodes them.

Source: docs/reference/package-format.md, section "Submodels".
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final

from edgekit_runtime.canonical_json import OPTIONAL, JsonValue, Record, encode_json
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE, SUBMODEL_BYTES_FIGURE
from edgekit_runtime.package.golden import Golden
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice, require, require_token
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import MAX_DIMENSION, TensorSpec

MAX_SUBMODELS: Final = 64
HEAD_SUFFIX: Final = ".head"
_MODEL_CHARS: Final = 30  # of the model's name in the name of its tail
_HASH_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Submodel(Record):
    """A part of a package's model with its own inputs and outputs.

    Attributes:
        name: A name that is unique in the package, such as `cut3-int8.tail`.
        backend: How to run the submodel. Its artifact has the role `submodel`. The graph may refer to weights
            in the artifact of the whole model as external data.
        golden: The inputs and the outputs that the submodel must reproduce.
        weights_bytes: How many bytes of the whole model's artifact the submodel reads, or 0 if unknown.
        divides_integers: Whether the submodel divides integers by a value that depends on its inputs, or None
            if unknown.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    backend: BackendChoice
    golden: Golden
    weights_bytes: int = field(default=0, metadata=OPTIONAL)
    divides_integers: bool | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require_token(self.name, "submodel name")
        for side, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = [spec.name for spec in specs]
            require(len(names) > 0, f"submodel '{self.name}': {side} is empty, expected at least one tensor")
            require(len(set(names)) == len(names), f"submodel '{self.name}': {side} holds a name twice")
        stated = self.weights_bytes
        require(
            type(stated) is int and 0 <= stated <= MAX_DIMENSION,
            f"submodel '{self.name}': weights_bytes is {stated!r}, expected a size in bytes",
        )
        require(
            self.divides_integers is None or isinstance(self.divides_integers, bool),
            f"submodel '{self.name}': divides_integers is {self.divides_integers!r}, expected true or false",
        )

    def list_figures(self, artifacts: Mapping[str, Artifact]) -> dict[str, JsonValue]:
        """Return the submodel's entries for the `figures` of a manifest."""
        figures: dict[str, JsonValue] = {SUBMODEL_BYTES_FIGURE: self._count_bytes(artifacts)}
        if self.divides_integers is not None:
            figures[INTEGER_DIVISION_FIGURE] = self.divides_integers
        return figures

    def _count_bytes(self, artifacts: Mapping[str, Artifact]) -> int:
        """Return the size of its graph and of the weights that it reads, or may read."""
        name = self.backend.options.get("weights")
        weights_bytes = artifacts[name].size_bytes if isinstance(name, str) else 0
        stated = self.weights_bytes or weights_bytes
        return artifacts[self.backend.artifact].size_bytes + min(stated, weights_bytes)


def list_tails(submodels: Sequence[Submodel]) -> list[Submodel]:
    """Return the submodels that run on a server: all except heads, whose names end in `.head`."""
    return [submodel for submodel in submodels if not submodel.name.endswith(HEAD_SUFFIX)]


def served_name(model: str, submodel: Submodel, artifacts: Mapping[str, Artifact]) -> str:
    """Return the name under which a server serves a submodel.

    The name contains a digest of the submodel's artifacts and options. A server that has another version does
    not know the name and responds with 404.

    `model` is the name of the package. `artifacts` is a dict from paths to the package's artifacts, at least
    those with the roles `model` and `submodel`.
    """
    paths = [choice.artifact for choice in submodel.backend.chain]
    weights = submodel.backend.options.get("weights")
    if isinstance(weights, str):
        paths.append(weights)
    parts = [artifacts[path].sha256.encode() for path in paths]
    parts += [
        encode_json(dict(choice.options)) for choice in submodel.backend.chain
    ]  # such as what it decodes
    digest = hashlib.sha256(b"\n".join(parts)).hexdigest()[:_HASH_CHARS]
    return f"{model[:_MODEL_CHARS]}.{submodel.name[:20]}.{digest}"


def check_submodels(submodels: tuple[Submodel, ...]) -> None:
    """Check that these submodels may be in one package.

    Raises:
        ManifestError: There are too many submodels, or two have the same name.
    """
    require(
        len(submodels) <= MAX_SUBMODELS,
        f"submodels holds {len(submodels)}, expected at most {MAX_SUBMODELS}",
    )
    names = [submodel.name for submodel in submodels]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"submodels: the name {', '.join(twice)} stands twice")
