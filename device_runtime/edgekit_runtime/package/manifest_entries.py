"""The entries of a manifest (format, artifacts, backend, task) and their validation."""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Final

from edgekit_runtime.canonical_json import Fields, JsonValue, Record, name_kind
from edgekit_runtime.errors import EdgekitError, ManifestError
from edgekit_runtime.package.member_names import find_name_problem
from edgekit_runtime.records import dataclass

FORMAT_VERSION: Final = 1
SUPPORTED_CRITICAL: Final = frozenset({"pipeline"})
MANIFEST_NAME: Final = "manifest.json"
MAX_BACKENDS: Final = 4  # a choice with its fallbacks. Also bounds the recursion

_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def require(condition: bool, message: str) -> None:
    """Raise `ManifestError` with `message` unless `condition` holds."""
    if not condition:
        raise ManifestError(f"{MANIFEST_NAME}: {message}")


def require_token(value: object, field: str) -> None:
    """Raise `ManifestError` unless `value` has 1 to 64 characters, which are letters, digits or `_.+-`."""
    require(
        isinstance(value, str) and _TOKEN.fullmatch(value) is not None,
        f"{field} is {value!r}, expected 1 to 64 letters, digits or '_.+-', starting with a letter or digit",
    )


def require_object(value: object, field: str) -> None:
    """Raise `ManifestError` unless `value` is a mapping with string keys."""
    is_object = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    require(is_object, f"{field} must be an object with string keys, got {name_kind(value)}")


@dataclass(frozen=True, slots=True)
class FormatInfo(Record):
    """The format version and features that a reader must support.

    Attributes:
        version: The version of the format. This reader supports version 1.
        critical: The features that a reader must support, see `SUPPORTED_CRITICAL`.

    Raises:
        ManifestError: The version is newer, or this reader does not support a critical feature.
    """

    version: int = FORMAT_VERSION
    critical: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        valid = isinstance(self.version, int) and not isinstance(self.version, bool) and self.version >= 1
        require(valid, f"format.version is {self.version!r}, expected a whole number of at least 1")
        require(
            self.version <= FORMAT_VERSION,
            f"format.version is {self.version}, this reader knows up to {FORMAT_VERSION}; update edgekit",
        )
        require(all(isinstance(name, str) for name in self.critical), "format.critical must hold strings")
        unknown = sorted(set(self.critical) - SUPPORTED_CRITICAL)
        require(
            not unknown, f"format.critical needs {', '.join(unknown)}, unknown to this reader; update edgekit"
        )


@dataclass(frozen=True, slots=True)
class Artifact(Record):
    """One file in the package.

    Attributes:
        path: The name of the ZIP member.
        sha256: The digest of the content, 64 hexadecimal digits in lower case.
        role: `model`, `submodel`, `golden`, `labels`, `preprocessing`, `cut-table` or `member`. Artifacts
            with other roles are verified, but not used.
    """

    path: str
    size_bytes: int = field(metadata={"key": "bytes"})
    sha256: str
    role: str

    def __post_init__(self) -> None:
        require(isinstance(self.path, str), f"artifact path is {self.path!r}, expected a string")
        problem = find_name_problem(self.path)
        require(problem is None, f"artifact path {self.path!r} {problem}")
        valid = (
            isinstance(self.size_bytes, int)
            and not isinstance(self.size_bytes, bool)
            and self.size_bytes >= 0
        )
        require(
            valid, f"artifact '{self.path}': bytes is {self.size_bytes!r}, expected a whole number from 0"
        )
        require(
            isinstance(self.sha256, str) and _SHA256.fullmatch(self.sha256) is not None,
            f"artifact '{self.path}': sha256 is {self.sha256!r}, expected 64 lower-case hex digits",
        )
        require_token(self.role, f"artifact '{self.path}': role")


@dataclass(frozen=True, slots=True)
class BackendChoice(Record):
    """The engine that runs an artifact, its options, and the fallback if that engine is missing.

    Attributes:
        name: The name of the backend, for example `ort`.
        artifact: The path of the model artifact.
        fallback: The choice to try next, or None. There are at most `MAX_BACKENDS` choices in total.
    """

    name: str
    artifact: str
    options: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    fallback: "BackendChoice | None" = None

    def __post_init__(self) -> None:
        require_token(self.name, "backend name")
        require(isinstance(self.artifact, str), f"backend '{self.name}': artifact must be a path")
        require_object(self.options, f"backend '{self.name}': options")
        require(
            len(self.chain) <= MAX_BACKENDS,
            f"backend '{self.name}': {len(self.chain)} choices, expected at most {MAX_BACKENDS}",
        )

    @property
    def chain(self) -> "tuple[BackendChoice, ...]":
        """This choice, followed by its fallbacks in the order in which they are tried."""
        fallbacks = () if self.fallback is None else self.fallback.chain
        return (self, *fallbacks)

    @classmethod
    def from_json(
        cls, value: object, where: str = "", error: type[EdgekitError] = ManifestError, *, depth: int = 0
    ) -> "BackendChoice":
        """Parse a choice from a JSON object. Only a fallback may omit the field `fallback`.

        `where` is the position in the manifest for error messages. `depth` is the number of earlier choices
        in the chain.

        Raises:
            ManifestError: A field is missing or wrong, or there are more than `MAX_BACKENDS` choices.
        """
        require(depth < MAX_BACKENDS, f"{where}: more than {MAX_BACKENDS} choices")
        fields = Fields(value, where, error)
        name, artifact, options = fields.take("name"), fields.take("artifact"), fields.take("options")
        fallback = fields.take_optional("fallback", None) if depth else fields.take("fallback")
        if fallback is not None:
            fallback = cls.from_json(fallback, f"{where}.fallback", error, depth=depth + 1)
        return cls(name, artifact, options, fallback, extra=fields.rest())

    def to_json(self, *, is_fallback: bool = False) -> dict[str, JsonValue]:
        fields: dict[str, JsonValue] = {"name": self.name, "artifact": self.artifact, "options": self.options}
        if self.fallback is not None:
            fields["fallback"] = self.fallback.to_json(is_fallback=True)
        elif not is_fallback:
            fields["fallback"] = None
        return {**self.extra, **fields}


@dataclass(frozen=True, slots=True)
class TaskChoice(Record):
    """The meaning of the outputs: a task of `edgekit_runtime.tasks` and its options.

    A reader that does not know the task can still run the model.
    """

    name: str
    options: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require_token(self.name, "task name")
        require_object(self.options, f"task '{self.name}': options")
