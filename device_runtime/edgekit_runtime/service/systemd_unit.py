"""The systemd unit of the service, written for where this Python is installed."""

import sys
from pathlib import Path
from typing import Final

_UNIT: Final = """\
[Unit]
Description=edgekit inference service
Documentation=man:systemd.exec(5)
After=network.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} serve
# Packages are trusted that the keys in /etc/edgekit/keys have signed.
Environment=EDGEKIT_STATE=/var/lib/edgekit EDGEKIT_HOME=/etc/edgekit EDGEKIT_CACHE=/var/cache/edgekit
Environment=ORT_DISABLE_TELEMETRY=1
Restart=always
RestartSec=100ms
WatchdogSec=10s
TimeoutStartSec=300s
TimeoutStopSec=45s
# SIGTERM only to the service, which ends its workers itself.
KillMode=mixed
# Not DynamicUser: its state folder can be reached by nobody who is to install a package, and its group by no
# application that is to use the socket.
User=edgekit
Group=edgekit
StateDirectory=edgekit
CacheDirectory=edgekit
RuntimeDirectory=edgekit
RuntimeDirectoryMode=0755
# A model's worker is ended before the service.
OOMPolicy=continue
OOMScoreAdjust=-100
LimitNOFILE=65536
NoNewPrivileges=yes
# Not PrivateDevices, nor ProtectClock, which closes /dev as well: engines open those of a GPU, and a
# Raspberry Pi tells of its power by one. The clock cannot be set without the capability.
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0027

[Install]
WantedBy=multi-user.target
"""


def write_unit(command: str | None = None) -> str:
    """Return the text of `edgekit.service`.

    Args:
        command: path of `edgekit-device`; by default the one beside this Python.
    """
    found = command or str(Path(sys.executable).parent / "edgekit-device")
    return _UNIT.format(command=found)
