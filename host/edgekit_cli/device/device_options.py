"""The options of all `edgekit device` commands, which select the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_runtime.errors import ProvisioningError

if TYPE_CHECKING:
    from edgekit_hil.provisioning.ssh_host import SshHost

host_option = click.option(
    "--host",
    required=True,
    metavar="[USER@]HOST[:PORT]",
    help="Host name of the device, or its name in ssh's configuration. ssh must know its host key, and the"
    " device must accept your key.",
)
ssh_config_option = click.option(
    "--ssh-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Configuration file of ssh.  [default: your own]",
)


def parse_host(text: str, ssh_config: Path | None) -> SshHost:
    """Parse the address of a device.

    ssh uses the configuration file `ssh_config`, or the user's own configuration if `ssh_config` is None.

    Raises:
        ConfigError: The text is not an address.
        ProvisioningError: This installation does not include the commands of `edgekit device`.
    """
    try:
        from edgekit_hil.provisioning.ssh_host import SshHost
    except ImportError as cause:
        raise ProvisioningError(
            f"cannot load what sets up devices: {cause}; install edgekit[host]"
        ) from cause
    return SshHost.parse(text, ssh_config)
