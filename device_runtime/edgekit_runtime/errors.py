"""The error classes. Each class has the exit code that the command line returns for it.

A message says what was expected and found, where, and what to do next. Exceptions of other libraries are
converted where the library is called.
"""

from typing import ClassVar


class EdgekitError(Exception):
    """Base class of all errors of edgekit. The command line prints them without a traceback."""

    exit_code: ClassVar[int] = 1


class ModelError(EdgekitError):
    """The source model cannot be used, for example because it is truncated, unsafe or has NaN weights."""

    exit_code = 3


class DataError(EdgekitError):
    """Calibration, evaluation or input data do not fit the model."""

    exit_code = 4


class BudgetError(EdgekitError):
    """No candidate meets all limits at once.

    Attributes:
        binding: names of the limits that cannot be met.
        closest: id of the candidate that comes closest to the limits, or None.
        needed: what would have to change, or None if unknown.
        report: path of the report as JSON, or None if no report was written.
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
    """Content does not have the signed size or digest."""


class SignatureError(PackageError):
    """The signature is missing, malformed, wrong, or made with a key that is not trusted.

    Attributes:
        key_id: id of the key that the envelope names, or None if there is none.
    """

    exit_code = 8

    def __init__(self, message: str, key_id: str | None = None) -> None:
        super().__init__(message)
        self.key_id = key_id


class BackendError(EdgekitError):
    """An inference engine is missing, or has refused a model or an input."""

    exit_code = 9


class RefusedInputError(BackendError):
    """An engine refused the inputs of one call, such as sizes that do not fit together or invalid indices.

    The specs of the model allow these inputs. The error shows only when the model runs.
    """


class OutputError(EdgekitError):
    """A result cannot be written, for example because of missing permissions or a full disk."""

    exit_code = 10


class RecipeError(EdgekitError):
    """A recipe is malformed, belongs to another model, or cannot be repeated with these tool versions."""

    exit_code = 11


class UnavailableError(EdgekitError):
    """The service cannot handle a call now, but may later. Over HTTP the status is 503.

    Attributes:
        retry_after_s: time after which to try again, in seconds, or None if unknown.
    """

    exit_code = 12

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowOpeningError(UnavailableError):
    """A package was not opened and tested in time, because the machine is busy or an engine hangs."""


class OverloadedError(UnavailableError):
    """More calls are waiting for a model than its queue can hold."""


class DeadlineError(EdgekitError):
    """A call had not begun by its deadline, and was not run. Over HTTP the status is 504."""

    exit_code = 13


class SlotError(EdgekitError):
    """An installed version cannot be chosen, changed or recorded, or an installation is refused."""

    exit_code = 14


class RequestError(EdgekitError):
    """The inference service or the fleet's HTTP interface refused a request.

    Attributes:
        retry_after_s: time after which to try again, in seconds, or None if unknown.
    """

    exit_code = 15

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class TransportError(EdgekitError):
    """A service cannot be reached, or the connection broke off."""

    exit_code = 16


class ConfigError(EdgekitError):
    """A configuration file is malformed, or asks for something unsafe."""

    exit_code = 17


class CutError(EdgekitError):
    """A graph cannot be split as requested, or no split meets the limits."""

    exit_code = 18


class FleetError(EdgekitError):
    """A fleet cannot do what was requested, for example because a device or release is unknown."""

    exit_code = 19


class NotFoundError(FleetError):
    """A fleet has nothing with this name. Over HTTP the status is 404."""


class BenchError(EdgekitError):
    """A bench cannot be used as requested, for example because it is in use or a command failed."""

    exit_code = 20


class BenchUnavailableError(BenchError):
    """A bench cannot be used now, for example because it requires root or its device is unreachable."""


class ProvisioningError(EdgekitError):
    """A device cannot be set up, for example because its host key is unknown or its disk is too small."""

    exit_code = 21
