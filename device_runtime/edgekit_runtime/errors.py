"""The error tree. Each class carries the exit code with which the command line ends.

A message says what, expected, got, where, and what to do next. Foreign exceptions are translated once, where
the foreign library is called.
"""

from typing import ClassVar


class EdgekitError(Exception):
    """An error that edgekit explains; the command line prints it without a traceback."""

    exit_code: ClassVar[int] = 1


class ModelError(EdgekitError):
    """The source model cannot be used: not a model, truncated, unsupported, unsafe or with NaN weights."""

    exit_code = 3


class DataError(EdgekitError):
    """Calibration, evaluation or input data do not fit the model."""

    exit_code = 4


class BudgetError(EdgekitError):
    """No candidate meets all limits at once.

    Attributes:
        binding: names of the limits that stand in the way.
        closest: id of the candidate that exceeds its limits least, where there is one.
        needed: what would have to change, where that is known.
        report: path of the report as JSON, where one was written.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        binding: tuple[str, ...] = (),
        closest: str | None = None,
        needed: str | None = None,
        report: str | None = None,
    ) -> None:
        super().__init__(message)
        self.binding = binding
        self.closest = closest
        self.needed = needed
        self.report = report


class TargetError(EdgekitError):
    """The target is unknown or its file is invalid."""

    exit_code = 6


class PackageError(EdgekitError):
    """A package is not in the canonical form, or exceeds a limit."""

    exit_code = 7


class ManifestError(PackageError):
    """The manifest is malformed, inconsistent or needs a newer reader."""


class DigestError(PackageError):
    """Content does not have the size or digest that was signed."""


class SignatureError(PackageError):
    """The signature is missing, malformed, wrong, or by a key that is not trusted.

    Attributes:
        key_id: id of the key that the envelope names, or None if there is none.
    """

    exit_code = 8

    def __init__(self, message: str, key_id: str | None = None) -> None:
        super().__init__(message)
        self.key_id = key_id


class BackendError(EdgekitError):
    """An inference engine is missing or refused a model or an input."""

    exit_code = 9


class RefusedInputError(BackendError):
    """An engine refused the inputs of one call: sizes that do not go together, indices beyond the end.

    The specs of the model allow them; only running it shows that they do not work.
    """


class OutputError(EdgekitError):
    """A result cannot be written: no permission, no space, not a folder."""

    exit_code = 10


class RecipeError(EdgekitError):
    """A recipe is malformed, of another model, or cannot be repeated with these tool versions."""

    exit_code = 11


class UnavailableError(EdgekitError):
    """The service cannot take a call now, and may later; 503 over HTTP.

    Attributes:
        retry_after_s: when to try again, in seconds, or None if unknown.
    """

    exit_code = 12

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowOpeningError(UnavailableError):
    """A package was not opened and tested in time: a busy machine, or an engine that hangs."""


class OverloadedError(UnavailableError):
    """More calls wait for a model than its queue holds."""


class DeadlineError(EdgekitError):
    """A call had not begun by its deadline, and was not run; 504 over HTTP."""

    exit_code = 13


class SlotError(EdgekitError):
    """An installed version cannot be chosen, changed or recorded, or an installation is refused."""

    exit_code = 14


class RequestError(EdgekitError):
    """A service refused a request: the inference service, or the fleet's HTTP interface.

    Attributes:
        retry_after_s: seconds after which to try again, or None if unknown.
    """

    exit_code = 15

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class TransportError(EdgekitError):
    """A service cannot be reached, or broke the connection off."""

    exit_code = 16


class ConfigError(EdgekitError):
    """A configuration file is malformed, or asks for what is unsafe."""

    exit_code = 17


class CutError(EdgekitError):
    """A graph cannot be split as asked, or no split keeps the limits."""

    exit_code = 18


class FleetError(EdgekitError):
    """A fleet cannot do what is asked: an unknown device or release, a malformed selector."""

    exit_code = 19


class NotFoundError(FleetError):
    """A fleet has nothing of that name; 404 over HTTP."""


class BenchError(EdgekitError):
    """A bench cannot be used as asked: a malformed environment file, in use, broken, a failed command."""

    exit_code = 20


class BenchUnavailableError(BenchError):
    """A bench cannot be used here now: no root, an unreachable device, another architecture."""


class ProvisioningError(EdgekitError):
    """A device cannot be set up: unknown host key, no rights, another architecture, too little disk."""

    exit_code = 21
