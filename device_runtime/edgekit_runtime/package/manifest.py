"""The manifest of a package: its contents, its target, how to run it and how to test it.

Every dataclass validates itself on construction, so an existing `Manifest` is always consistent. Unknown
fields that are not critical are preserved in `extra` at every level. This module does no I/O.

Source: docs/reference/package-format.md, section "manifest.json".
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import OPTIONAL, JsonValue, Record, decode_json, encode_json
from edgekit_runtime.errors import DataError, EdgekitError, ManifestError, PackageError
from edgekit_runtime.package.golden import Golden
from edgekit_runtime.package.manifest_entries import (
    MANIFEST_NAME,
    Artifact,
    BackendChoice,
    FormatInfo,
    TaskChoice,
    require,
    require_object,
    require_token,
)
from edgekit_runtime.package.member_names import find_names_problem
from edgekit_runtime.package.states import MAX_STATES, RecurrentState, find_states_problem
from edgekit_runtime.package.submodels import MAX_SUBMODELS, Submodel, check_submodels, served_name
from edgekit_runtime.package.variants import DEFAULT_VARIANT, MAX_VARIANTS, Variant, check_variants
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import TensorSpec

if TYPE_CHECKING:
    from edgekit_runtime.package.pipeline import Pipeline

__all__ = [
    "MANIFEST_NAME",
    "SIGNATURE_NAME",
    "Artifact",
    "BackendChoice",
    "FormatInfo",
    "Manifest",
    "RecurrentState",
    "Submodel",
    "TaskChoice",
    "Variant",
    "parse_manifest",
]

SIGNATURE_NAME: Final = "signature.dsse.json"
PIPELINE: Final = "pipeline"
"""The backend of packages with several models, and the critical feature of their format."""

MEMBER_ROLE: Final = "member"
_STATISTICS: Final = "stats"  # GET /v2/models/stats would hide a model of this name


def _read_pipeline(value: object, where: str, error: type[EdgekitError]) -> "Pipeline":
    from edgekit_runtime.package.pipeline import Pipeline  # most packages hold one model

    return Pipeline.from_json(value, where, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """Everything that a reader knows about a package before it opens an artifact.

    Attributes:
        name, version, target: The three parts of the name of the package file.
        inputs, outputs: The tensor specs of the model, at least one each.
        artifacts: The artifacts, sorted by path.
        golden: The inputs and expected outputs of the self-test.
        preprocessing, labels: The path of the artifact with that role, or None.
        budget: A dict from limit names, which include the unit, to finite numbers.
        figures: A dict from names to figures of the default variant, except those that vary between runs.
        provenance: The digests of the source model and the recipe, and the versions of the tools.
        variants: Further ways to run the model. The default variant is made of `backend`, `golden` and
            `figures`.
        submodels: The parts of the model that can run by themselves on the device or a server.
        task: The meaning of the outputs, or None.
        states: The outputs that are inputs of the next run of a sequence.
        pipeline: The stages of a package with several models, or None for a single model.

    Raises:
        ManifestError: A field has the wrong type or value, or two fields contradict each other.
    """

    # First, because a newer version may define every other field differently.
    format: FormatInfo = field(default_factory=FormatInfo)
    name: str
    version: str
    target: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    artifacts: tuple[Artifact, ...]
    backend: BackendChoice
    golden: Golden
    preprocessing: str | None = None
    labels: str | None = None
    budget: Mapping[str, float] = field(default_factory=dict, hash=False)
    figures: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    variants: tuple[Variant, ...] = field(default=(), metadata={**OPTIONAL, "most": MAX_VARIANTS})
    submodels: tuple[Submodel, ...] = field(default=(), metadata={**OPTIONAL, "most": MAX_SUBMODELS})
    task: TaskChoice | None = field(default=None, metadata=OPTIONAL)
    states: tuple[RecurrentState, ...] = field(default=(), metadata={**OPTIONAL, "most": MAX_STATES})
    pipeline: "Pipeline | None" = field(default=None, metadata={**OPTIONAL, "read": _read_pipeline})

    def __post_init__(self) -> None:
        for key in ("name", "version", "target"):
            require_token(getattr(self, key), key)
        require(
            self.name != _STATISTICS,
            f"name is '{_STATISTICS}', which is where the service has statistics; choose another name",
        )
        for key in ("budget", "figures", "provenance"):
            require_object(getattr(self, key), key)
        for limit, value in self.budget.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            finite = is_number and -math.inf < value < math.inf  # isfinite() overflows on huge integers
            require(finite, f"budget '{limit}' is {value!r}, expected a finite number")
        for side, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = [spec.name for spec in specs]
            require(len(names) > 0, f"{side} is empty, expected at least one tensor")
            require(len(set(names)) == len(names), f"{side} holds a tensor name twice: {', '.join(names)}")
        problem = find_states_problem(self.states, self.inputs, self.outputs)
        require(problem is None, f"states: {problem}")
        self._check_paths()
        self._check_pipeline()
        check_variants(self.variants)
        for variant in self.all_variants:
            self._check_variant(variant)
        check_submodels(self.submodels)
        for submodel in self.submodels:
            self._check_submodel(submodel)
        if self.preprocessing is not None:
            self._find(self.preprocessing, "preprocessing", "preprocessing")
        if self.labels is not None:
            self._find(self.labels, "labels", "labels")

    def _check_paths(self) -> None:
        paths = [artifact.path for artifact in self.artifacts]
        require(paths == sorted(paths), "artifacts are not sorted by path")
        problem = find_names_problem([MANIFEST_NAME, SIGNATURE_NAME, *paths])
        require(problem is None, f"artifacts: {problem}")

    def _check_pipeline(self) -> None:
        require(
            (PIPELINE in self.format.critical) == (self.pipeline is not None),
            f"the field pipeline and the critical feature '{PIPELINE}' go together",
        )
        for stage in () if self.pipeline is None else self.pipeline.members:
            self._find(stage.manifest_path, MEMBER_ROLE, f"stage '{stage.name}'")

    def _check_variant(self, variant: Variant) -> None:
        of = "" if variant.name == DEFAULT_VARIANT else f"variant '{variant.name}': "
        role = "model" if self.pipeline is None else MEMBER_ROLE
        for choice in variant.backend.chain:
            self._find(choice.artifact, role, f"{of}backend '{choice.name}'")
        self._check_golden(variant.golden, self.inputs, self.outputs, of)

    def _check_submodel(self, submodel: Submodel) -> None:
        of = f"submodel '{submodel.name}': "
        for choice in submodel.backend.chain:
            self._find(choice.artifact, "submodel", f"{of}backend '{choice.name}'")
            if "weights" in choice.options:
                weights = choice.options["weights"]
                require(isinstance(weights, str), f"{of}weights must be a path")
                self._find(str(weights), "model", f"{of}weights")
        self._check_golden(submodel.golden, submodel.inputs, submodel.outputs, of)

    def _check_golden(
        self, golden: Golden, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], of: str
    ) -> None:
        try:
            golden.check(inputs, outputs)
            sizes = golden.artifact_sizes()
        except DataError as cause:
            raise ManifestError(f"{MANIFEST_NAME}: {of}{cause}") from cause
        for name, path, size_bytes, shape in sizes:
            artifact = self._find(path, "golden", f"{of}golden tensor '{name}'")
            require(
                artifact.size_bytes == size_bytes,
                f"{of}golden tensor '{name}': artifact '{path}' has {artifact.size_bytes} bytes, expected"
                f" {size_bytes} for shape {list(shape)}",
            )

    def _find(self, path: str, role: str, user: str) -> Artifact:
        for artifact in self.artifacts:
            if artifact.path == path and artifact.role == role:
                return artifact
        raise ManifestError(f"{MANIFEST_NAME}: {user} names {path!r}, which is no artifact of role '{role}'")

    @property
    def file_name(self) -> str:
        """The name of the package file: `NAME-VERSION-TARGET.edgepkg`."""
        return f"{self.name}-{self.version}-{self.target}.edgepkg"

    @property
    def needs_answerer(self) -> bool:
        """Whether the manifest describes the meaning of inputs or outputs, so an `Answerer` is needed."""
        return bool(self.task or self.preprocessing or self.labels)

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """All variants: the default variant first, then `variants` in order."""
        return (Variant(DEFAULT_VARIANT, self.backend, self.golden, self.figures), *self.variants)

    def select(self, variant: str) -> "Manifest":
        """Return a copy of the manifest in which the named variant is the only one.

        Raises:
            PackageError: There is no variant of that name.
        """
        named = {variant.name: variant for variant in self.all_variants}
        if variant not in named:
            raise PackageError(f"{self.file_name}: no variant '{variant}', there are: {', '.join(named)}")
        chosen = named[variant]
        return replace(
            self, backend=chosen.backend, golden=chosen.golden, figures=chosen.figures, variants=()
        )

    def select_submodel(self, name: str) -> "Manifest":
        """Return a manifest that describes a submodel as if it were the whole model.

        The new manifest has the name that `served_name` returns.

        Raises:
            PackageError: There is no submodel of that name.
        """
        named = {submodel.name: submodel for submodel in self.submodels}
        if name not in named:
            there = ", ".join(named) or "none"
            raise PackageError(f"{self.file_name}: no submodel '{name}', there are: {there}")
        chosen = named[name]
        artifacts = {artifact.path: artifact for artifact in self.artifacts}
        return Manifest(
            name=served_name(self.name, chosen, artifacts),
            version=self.version,
            target=self.target,
            inputs=chosen.inputs,
            outputs=chosen.outputs,
            # As models: the file of a submodel is the model now.
            artifacts=tuple(
                replace(artifact, role="model") if artifact.role == "submodel" else artifact
                for artifact in self.artifacts
            ),
            backend=chosen.backend,
            golden=chosen.golden,
            figures=chosen.list_figures(artifacts),
        )

    @property
    def sha256(self) -> str:
        """The SHA-256 of `to_bytes()` in hexadecimal, which identifies the package."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON, the content of `manifest.json`.

        Raises:
            ManifestError: `figures`, `provenance`, `options` or `extra` holds a value that JSON cannot
                express.
        """
        try:
            return encode_json(self.to_json())
        except (ValueError, TypeError, RecursionError) as cause:
            raise ManifestError(f"{MANIFEST_NAME}: cannot be written as JSON: {cause}") from cause


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest from canonical JSON. The caller must limit the size of `data`.

    Raises:
        ManifestError: `data` is malformed, not canonical or inconsistent, or needs a newer reader.
    """
    document = decode_json(data, MANIFEST_NAME, ManifestError)
    try:
        return Manifest.from_json(document, MANIFEST_NAME)
    except DataError as cause:
        raise ManifestError(str(cause)) from cause
