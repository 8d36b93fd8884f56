"""A device behind a real OpenSSH server: this machine's system with folders and network of its own.

Its /etc, /opt, /run, /usr/local and /var/lib are copies that vanish with it, and it has no network: ssh's
client reaches the server by `ProxyCommand`. `systemctl` is a script that notes what it is asked, `sudo`
one that asks for no password, and `sync` one that does nothing: it would wait for all disks of this machine.
pip compiles no modules there, which takes most of the time of an installation. A login reads nothing from the
home of this machine's user, and keys are exchanged without the algorithm against quantum computers: both take
most of the time of a connection.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgekit_hil.provisioning.ssh_host import SshHost

PROGRAMS = ("ssh", "ssh-keygen", "/usr/sbin/sshd", "unshare", "nsenter", "setpriv", "runuser", "flock")
SYSTEMCTL = """#!/bin/sh
echo "$*" >>/run/systemctl.log
release=$(readlink /opt/edgekit/current)
case $1 in
    is-active)
        for unit; do :; done
        [ -e "/run/active.$unit" ] || { echo inactive; exit 3; }
        echo active
        ;;
    restart)
        [ "${release##*/}" != "$(cat /run/refused 2>/dev/null)" ] || exit 1
        touch "/run/active.$2"
        ;;
    disable) rm -f /run/active.* ;;
esac
"""
SUDO = """#!/bin/sh
[ "$1" = -n ] || exit 1 # asks for a password
shift
exec /usr/local/bin/raise --reuid 0 --regid 0 --clear-groups "$@"
"""
SETUP = """set -e
mount -t tmpfs tmpfs /mnt
for folder in etc opt usr/local var/lib; do
    own=/mnt/$folder
    mkdir -p $own/upper $own/work
    if [ -n "$6" ]; then cp -a "$6/mnt/$folder/upper" $own; fi
    mount -t overlay overlay -o lowerdir=/$folder,upperdir=$own/upper,workdir=$own/work /$folder
done
mount -t tmpfs tmpfs /run
mkdir /run/sshd
cp "$5" /run/user_key.pub # where every user may read it
if [ -n "$6" ]; then cp "$6"/run/active.* /run; fi
if [ "$2" = 1 ]; then mkdir -p /run/systemd/system; fi
cp "$1" /usr/local/bin/systemctl
printf '#!/bin/sh\n' >/usr/local/bin/sync
chmod 755 /usr/local/bin/sync
if [ "$3" != root ]; then
    useradd --no-create-home --home-dir / --shell /bin/sh --password '*' "$3"
    cp "$(command -v setpriv)" /usr/local/bin/raise
    chmod 4755 /usr/local/bin/raise
    cp "$4" /usr/local/bin/sudo
fi
touch /run/ready
exec sleep infinity
"""
SSHD = """HostKey {folder}/host_key
AuthorizedKeysFile /run/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
KexAlgorithms curve25519-sha256
SetEnv HOME=/run PIP_NO_COMPILE=1 OPENBLAS_NUM_THREADS=1
"""
SSH = """Host device
    User {user}
    ProxyCommand nsenter -t {pid} -m -n /usr/sbin/sshd -i -f {folder}/sshd_config
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


def find_obstacle() -> str | None:
    """Return why there can be no such device here, or None."""
    if os.geteuid() != 0:
        return "a device behind ssh needs root, for folders and a network of its own"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"a device behind ssh needs {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class SshDevice:
    """A device.

    Attributes:
        folder: keys and configuration of ssh.
        pid: of a process in it.
    """

    folder: Path
    pid: int

    @property
    def host(self) -> SshHost:
        return SshHost("device", config=self.folder / "ssh_config")

    def run(self, command: str) -> str:
        """Return what a command prints there."""
        words = ["nsenter", "-t", str(self.pid), "-m", "-n", "sh", "-c", command]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def open_device(
    folder: Path,
    *,
    has_systemd: bool = True,
    has_network: bool = False,
    user: str = "root",
    like: SshDevice | None = None,
) -> Iterator[SshDevice]:
    """Yield a new device; with a network it has that of this machine, and another user than root has sudo.

    Args:
        folder: for its keys and configuration of ssh.
        like: a device whose disk and running services it has.
    """
    for name in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    (folder / "known_hosts").write_text(f"device {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "systemctl").write_text(SYSTEMCTL)
    (folder / "sudo").write_text(SUDO)
    for name in ("systemctl", "sudo"):
        (folder / name).chmod(0o755)
    arguments = [str(folder / "systemctl"), str(int(has_systemd)), user, str(folder / "sudo")]
    arguments += [str(folder / "user_key.pub"), "" if like is None else f"/proc/{like.pid}/root"]
    words = ["sh", "-c", SETUP, "sh", *arguments]
    unshare = ["unshare", "-m", *([] if has_network else ["-n"])]
    process = subprocess.Popen([*unshare, "setpriv", "--pdeathsig", "KILL", *words])
    try:
        device = SshDevice(folder, process.pid)
        end_s = time.monotonic() + 20
        while not Path(f"/proc/{process.pid}/root", "run", "ready").exists():
            assert process.poll() is None, "the device does not start"
            assert time.monotonic() < end_s, "the device does not get ready"
            time.sleep(0.01)
        (folder / "ssh_config").write_text(SSH.format(pid=process.pid, folder=folder, user=user))
        yield device
    finally:
        process.kill()
        process.wait()
