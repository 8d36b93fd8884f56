"""Reads a key from the kernel's keyring. This key encrypts the private key of the device.

It has the type `user`, 32 bytes and the name `edgekit:device`. It must be in a keyring of this process
or of its user. A restart empties the keyrings, so the key must be loaded at each boot. The owner decides how
to load it, for example from an initramfs or a network. The security of this holder depends on that choice.

Source: keyctl(2), request_key(2), keyrings(7).
"""

import os
from typing import Final

from edgekit_runtime.encryption.container import KEY_BYTES, EncryptionError
from edgekit_runtime.errors import EdgekitError, UnavailableError

NAME: Final = "edgekit:device"
_TYPE: Final = b"user"
_KEYCTL_SEARCH, _KEYCTL_READ = 10, 11
_USER_KEYRING: Final = -4
# By machine, the numbers of the system calls request_key and keyctl.
_CALLS: Final = {
    "x86_64": (249, 250),
    "aarch64": (218, 219),
    "riscv64": (218, 219),
    "armv7l": (310, 311),
    "armv6l": (310, 311),
}


def is_available() -> bool:
    """Return whether the kernel's keyring contains the key, and this user may read it."""
    try:
        return bool(read_key())
    except EdgekitError:
        return False


def read_key() -> bytes:
    """Return the 32 bytes of the key.

    Raises:
        UnavailableError: the key is not loaded.
        EncryptionError: the key may not be read, or has another size.
    """
    serial = _find_key()
    if serial is None:
        raise UnavailableError(
            f"the kernel's keyring has no key '{NAME}': a restart empties it, and the boot of this device has"
            f" to load the key again, such as `keyctl padd user {NAME} @u < key`"
        )
    import ctypes  # which other holders do without

    content = ctypes.create_string_buffer(KEY_BYTES + 1)
    size_bytes = _call(1, _KEYCTL_READ, serial, content, len(content))
    if size_bytes != KEY_BYTES:
        problem = (
            f"has {size_bytes} bytes, expected {KEY_BYTES}"
            if size_bytes >= 0
            else "may not be read; see `keyctl setperm`"
        )
        raise EncryptionError(f"the key '{NAME}' in the kernel's keyring {problem}")
    return content.raw[:KEY_BYTES]


def _find_key() -> int | None:
    """Return the serial number of the key, or None: not loaded, or the kernel refuses such calls."""
    name = NAME.encode()
    for serial in (_call(0, _TYPE, name, None, 0), _call(1, _KEYCTL_SEARCH, _USER_KEYRING, _TYPE, name, 0)):
        if serial > 0:
            return serial
    return None


def _call(index: int, *arguments: object) -> int:
    import ctypes

    machine = os.uname().machine
    if machine not in _CALLS:
        return -1
    native = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    try:
        return int(ctypes.CDLL(None).syscall(ctypes.c_long(_CALLS[machine][index]), *native))
    except (OSError, AttributeError):
        return -1
