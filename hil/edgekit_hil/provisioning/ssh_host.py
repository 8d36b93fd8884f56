"""A device that is reached with the OpenSSH client and its configuration.

labgrid's driver is not used, because it accepts unknown host keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ConfigError, ProvisioningError, TransportError
from edgekit_runtime.system.child_process import run_program

_CONNECT_S: Final = 15
_SSH_FAILED: Final = 255
_MAX_OUTPUT_BYTES: Final = 1 << 20
_OPTIONS: Final = {
    "BatchMode": "yes",  # asks no questions, neither for a password nor about a host key
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
    "ForwardAgent": "no",
    "LogLevel": "ERROR",
}


@dataclass(frozen=True, slots=True)
class SshHost:
    """The address of a device.

    Attributes:
        name: `[USER@]HOST`, or a name in the ssh configuration.
        port: The port of the ssh server, or None for the port in the ssh configuration.
        config: The path of an ssh configuration, or None for the user's own.
    """

    name: str
    port: int | None = None
    config: Path | None = None

    @classmethod
    def parse(cls, text: str, config: Path | None = None) -> "SshHost":
        """Parse an address of the form `[USER@]HOST[:PORT]`.

        Raises:
            ConfigError: The text is malformed.
        """
        name, colon, port = text.partition(":")
        if not name.rpartition("@")[2] or name.startswith("-") or (colon and not port.isdecimal()):
            raise ConfigError(f"host {text!r}: expected [USER@]HOST[:PORT], such as pi@raspberrypi.local")
        return cls(name, int(port) if colon else None, config)

    def run(self, command: str, sent: Iterable[bytes], limit_s: float) -> list[str]:
        """Run a command on the device, and return its lines of output.

        Args:
            command: A command for the user's shell.
            sent: The standard input of the command in parts.
            limit_s: The time limit for the whole call.

        Raises:
            TransportError: The device cannot be reached, or does not answer in time.
            ProvisioningError: The host key or the user's key is not accepted, or the command fails.
        """
        argv = ["ssh", "-T", *(f"-o{name}={value}" for name, value in _OPTIONS.items())]
        argv += [] if self.config is None else ["-F", str(self.config)]
        argv += [] if self.port is None else ["-p", str(self.port)]
        try:
            result = run_program([*argv, "--", self.name, command], sent, limit_s, _MAX_OUTPUT_BYTES)
        except FileNotFoundError as cause:
            raise ProvisioningError("there is no ssh here: install OpenSSH's client") from cause
        if result.exit_code is None:
            raise TransportError(f"{self.name}: no answer within {limit_s:.0f} s; run the command again")
        if result.exit_code == _SSH_FAILED:
            self._explain(result.last_line)
        if result.exit_code:
            raise ProvisioningError(f"{self.name}: {result.last_line or f'exit code {result.exit_code}'}")
        return result.output.decode(errors="replace").splitlines()

    def _explain(self, line: str) -> None:
        """Raise the error for the last line that ssh printed."""
        if "Host key verification failed" in line:
            raise ProvisioningError(
                f"{self.name}: its host key is unknown here, or has changed. Connect once with `ssh"
                f" {self.name}`, compare the fingerprint with that on the device, then run this again"
            )
        if "Permission denied" in line or "Too many authentication failures" in line:
            raise ProvisioningError(
                f"{self.name}: refuses the login ({line}); copy your key there: ssh-copy-id {self.name}"
            )
        raise TransportError(f"{self.name}: cannot be reached: {line or 'ssh gave no reason'}")
