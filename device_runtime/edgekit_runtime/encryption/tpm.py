"""The key of this device in its TPM 2.0, which is accessed with tpm2-tools.

The TPM derives the key from its own seed and from 32 random bytes in `device-key.json`. It computes the key
exchange itself, so the private key never leaves the TPM. The key is lost after `tpm2_clear`, or when the
board or the TPM is replaced.

Source: TPM 2.0 Library, part 3, TPM2_CreatePrimary and TPM2_ECDH_ZGen; tpm2_createprimary(1).
"""

import base64
import os
import re
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.encryption.container import EncryptionError
from edgekit_runtime.encryption.key_wrapping import Exchange
from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.system.memory_folder import open_memory_folder

_DEVICE: Final = Path("/dev/tpmrm0")
_ADDRESS: Final = "TPM2TOOLS_TCTI"  # variable of tpm2-tools, such as for a TPM in software
_PROGRAMS: Final = ("tpm2_createprimary", "tpm2_ecdhzgen", "tpm2_flushcontext")
_ATTRIBUTES: Final = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|noda|decrypt"
_PREFIX: Final = "edgekit-tpm-"
_TIMEOUT_S: Final = 60.0
_BUFFER_BYTES: Final = 128  # of a coordinate in tpm2-tss
_COORDINATE = re.compile(r"^([xy]): ([0-9a-f]{64})\s*$", re.MULTILINE)


def is_available() -> bool:
    """Return whether this user has access to a TPM, and tpm2-tools is installed."""
    import shutil  # which other holders do without

    reaches = bool(os.environ.get(_ADDRESS)) or os.access(_DEVICE, os.R_OK | os.W_OK)
    return reaches and all(shutil.which(program) for program in _PROGRAMS)


def create() -> tuple[Mapping[str, Any], bytes]:
    unique = os.urandom(32)
    with open_memory_folder(_PREFIX) as folder:
        point = _load_key(folder, unique)
        _flush()
    return {"unique": base64.b64encode(unique).decode()}, point


def open_exchange(stored: Mapping[str, Any]) -> Exchange:
    """Return a function that computes a key exchange in the TPM.

    Each call of that function loads the key again. It raises `UnavailableError` if tpm2-tools is missing or
    the TPM refuses or does not answer in time, and `EncryptionError` if tpm2-tools prints no public key.

    Args:
        stored: result of `create`, with 32 bytes in base64 as `unique`.

    Raises:
        KeyError, TypeError, ValueError: `stored` is malformed.
    """
    unique = base64.b64decode(stored["unique"], validate=True)

    def exchange(point: bytes) -> bytes:
        body = b"".join(struct.pack(">H", 32) + point[begin : begin + 32] for begin in (1, 33))
        with open_memory_folder(_PREFIX) as folder:
            _load_key(folder, unique)
            try:
                (folder / "point").write_bytes(struct.pack(">H", len(body)) + body)
                _run(folder, "tpm2_ecdhzgen", "-c", "key", "-u", "point", "-o", "product")
            finally:
                _flush()
            product = (folder / "product").read_bytes()  # a TPM2B_ECC_POINT: sizes before the coordinates
        (size_bytes,) = struct.unpack_from(">H", product, 2)
        return product[4 : 4 + size_bytes].rjust(32, b"\0")

    return exchange


def _load_key(folder: Path, unique: bytes) -> bytes:
    """Load the key as `key` in `folder`, and return its public point."""
    # A TPMS_ECC_POINT as it lies in memory, which `--unique-data` takes.
    coordinates = (unique, bytes(32))
    (folder / "unique").write_bytes(
        b"".join(struct.pack("=H", len(part)) + part.ljust(_BUFFER_BYTES, b"\0") for part in coordinates)
    )
    arguments = ("-C", "o", "-G", "ecc256", "-a", _ATTRIBUTES, "-u", "unique", "-c", "key")
    output = _run(folder, "tpm2_createprimary", *arguments)
    point = dict(_COORDINATE.findall(output))
    if len(point) != len(coordinates):
        raise EncryptionError("tpm2_createprimary printed no public key")
    return b"\x04" + bytes.fromhex(point["x"] + point["y"])


def _flush() -> None:
    """Free the memory of a TPM that nothing manages; the kernel's `/dev/tpmrm0` has done so already."""
    subprocess.run(["tpm2_flushcontext", "-t"], capture_output=True, timeout=_TIMEOUT_S, check=False)


def _run(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except FileNotFoundError as cause:
        raise UnavailableError(f"the TPM's key needs {command[0]}; install tpm2-tools") from cause
    except subprocess.TimeoutExpired as cause:
        raise UnavailableError(f"the TPM did not answer within {_TIMEOUT_S:g} s") from cause
    except subprocess.CalledProcessError as cause:
        reason = (cause.stderr.strip().splitlines() or ["it printed no message"])[-1]
        raise UnavailableError(f"the TPM refused: {command[0]}: {reason}") from cause
    return done.stdout
