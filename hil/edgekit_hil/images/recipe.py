"""The contents of an image."""

import ast
import functools
import hashlib
from pathlib import Path
from typing import Final

from edgekit_host.pinned_packages import PINNED_ENGINES, find_list
from edgekit_toolkit.targets.loader import load_target

PACKAGES: Final = tuple(
    """
    base-files base-passwd bash coreutils dash debianutils diffutils findutils grep gzip hostname libc-bin
    login mount ncurses-base passwd sed tar util-linux procps systemd-sysv udev dbus iproute2 openssh-server
    python3 python3-venv libstdc++6 e2fsprogs kmod busybox-static
    """.split()
)
KERNEL: Final = "linux-image-arm64"

EXCLUDED: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")

# Loaded before the file system of the root is mounted.
BOOT_MODULES: Final = (
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "crc32c_generic",
    "ext4",
    "i6300esb",
)
# For tests: faults of links and of block devices.
TEST_MODULES: Final = tuple(
    """
    sch_netem sch_tbf sch_ingress ifb act_mirred cls_matchall dm-flakey dm-log-writes loop overlay softdog
    """.split()
)

# Those that a Raspberry Pi 5 gets without asking for more. Their packages are those of a device.
ENGINES: Final = tuple(name for name in PINNED_ENGINES if name not in load_target("rpi5").backend.optional)
# Further imports of the runtime's tests.
TEST_WHEELS: Final = ("zstandard==0.25.0", "pillow==13.0.0", "pytest==9.2.0")

DISK_BYTES: Final = 2 << 30
DATA_DISK_BYTES: Final = 512 << 20
MACHINE: Final = "aarch64"
MEMORY: Final = "1024M"
CPU: Final = "cortex-a76"
KERNEL_ARGUMENTS: Final = (
    "console=ttyAMA0 quiet loglevel=3 net.ifnames=0 mitigations=off nokaslr selinux=0 apparmor=0 audit=0"
    " systemd.show_status=0 random.trust_cpu=on"
)

# Files that Debian's maintainer scripts would write, for an unattended machine.
_PAM: Final = {
    "auth": "auth sufficient pam_unix.so nullok\nauth required pam_deny.so\n",
    "account": "account required pam_unix.so\n",
    "password": "password required pam_unix.so yescrypt\n",
    "session": "session required pam_unix.so\n",
    "session-noninteractive": "session required pam_unix.so\n",
}
FILES: Final = {
    **{f"etc/pam.d/common-{name}": text for name, text in _PAM.items()},
    "etc/hostname": "edge\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 edge\n::1 localhost\n",
    "etc/fstab": "/dev/vda / ext4 noatime 0 0\n/dev/vdb /data ext4 noatime,nofail 0 0\n",
    "etc/machine-id": "",
    "etc/shells": "/bin/sh\n/bin/bash\n",
    "etc/ssh/sshd_config": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nUsePAM no\nUseDNS no\nSubsystem sftp internal-sftp\n"
    ),
    # qemu's user network without gateway and name server, so the machine has no internet.
    "etc/systemd/network/10-qemu.network": (
        "[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "etc/sysusers.d/sshd.conf": "u sshd - - /run/sshd /usr/sbin/nologin\n",
}
_WANTS: Final = "etc/systemd/system/multi-user.target.wants"
_MASKED: Final = tuple(
    """
    systemd-networkd-wait-online.service e2scrub_reap.service getty.target dpkg-db-backup.timer
    serial-getty@ttyAMA0.service e2scrub_all.timer fstrim.timer systemd-pstore.service
    """.split()
)
LINKS: Final = {
    "usr/bin/awk": "mawk",
    "etc/mtab": "../proc/self/mounts",
    "etc/localtime": "/usr/share/zoneinfo/UTC",
    "etc/systemd/system/default.target": "/lib/systemd/system/multi-user.target",
    f"{_WANTS}/ssh.service": "/lib/systemd/system/ssh.service",
    f"{_WANTS}/systemd-networkd.service": "/lib/systemd/system/systemd-networkd.service",
    **{f"etc/systemd/system/{unit}": "/dev/null" for unit in _MASKED},
}
FOLDERS: Final = ("data", "var/lib/systemd", "var/log", "root/.ssh")

# The first program of the kernel: loads modules, mounts the root and starts systemd there.
INIT: Final = """\
#!/bin/busybox sh
busybox=/bin/busybox
disk=/root
$busybox mount -t devtmpfs none /dev
$busybox mount -t proc none /proc
for module in $($busybox cat /modules); do $busybox insmod $module; done
for try in 1 2 3 4 5; do $busybox mount -t ext4 -o noatime /dev/vda $disk && break; $busybox sleep 1; done
# The kernel's list of modules; only on the first boot, when the image is made.
[ -e $disk/lib/modules/$($busybox uname -r)/modules.dep.bin ] || $busybox chroot $disk /sbin/depmod
$busybox mount --move /dev $disk/dev
$busybox umount /proc
exec $busybox switch_root $disk /sbin/init
"""


def hash_recipe(*versions: str) -> str:
    """Return 16 hexadecimal digits of a hash of the recipe and of `versions`.

    The recipe consists of the engines' package lists and the code of this folder's modules, without
    docstrings and comments. The hash may differ between minor versions of Python.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(_read_code(path))
    for path in map(find_list, ENGINES):
        digest.update(path.read_bytes())
    for text in versions:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:16]


@functools.cache
def _read_code(path: Path) -> bytes:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:]
    return ast.unparse(tree).encode()
