"""Stores the encrypted samples of a fleet, and the private key that decrypts them.

Devices encrypt the samples. The files are stored in the bucket of the packages, or in the folder `samples` of
the fleet. The private key is stored with the keys of the fleet and not in the bucket, so a copy of the bucket
cannot be decrypted.
"""

import base64
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_fleet.releases.artifact_storage import ArtifactStorage
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_runtime.errors import ConfigError, DataError, NotFoundError
from edgekit_runtime.protocol.samples import SAMPLE_ID, Sample, read_sample, sample_info
from edgekit_runtime.system.atomic_files import make_folders, write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_KEY: Final = "samples.pem"
_PREFIX: Final = "samples"
_CACHE: Final = "private, no-store"


class SampleVault:
    """Stores encrypted samples, and decrypts them only in memory.

    Attributes:
        incoming: The folder of incomplete uploads.
    """

    def __init__(self, folder: FleetFolder, settings: FleetSettings) -> None:
        """Set the paths. Keys and samples are read when needed."""
        self._folder, self._samples = folder, folder.path / _PREFIX
        self.incoming = self._samples / "incoming"
        is_bucket = settings.artifacts_storage and not settings.artifacts_storage.startswith("file:")
        self._bucket_url = settings.artifacts_storage if is_bucket else ""

    def make_key(self) -> str:
        """Return the public key in base64. Create the key pair first if there is none.

        Raises:
            FleetError: This is an additional manager, to which no device sends samples.
            ConfigError: The private key cannot be read.
            OutputError: The private key cannot be written.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        self._folder.check_repository()
        path = self._folder.identity / _KEY
        if not path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            make_folders(path.parent, 0o700)
            with write_atomically(path, mode=0o600) as file:
                file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return base64.b64encode(self._point).decode("ascii")

    def unseal(self, sample_id: str, sealed: bytes) -> Sample:
        """Return the sample in an encrypted file from an untrusted device.

        Raises:
            DataError: The file is damaged, or was encrypted for another key or another sample id.
            ConfigError: The private key cannot be read.
        """
        from edgekit_runtime.encryption.container import EncryptionError
        from edgekit_runtime.encryption.key_wrapping import make_exchange, unseal

        try:
            plain = unseal(sealed, make_exchange(self._key), self._point, sample_info(sample_id))
        except EncryptionError as cause:
            raise DataError(
                "the sample is not sealed for this fleet and identifier, or is damaged"
            ) from cause
        sample = read_sample(plain)
        if sample.header.id != sample_id:
            raise DataError(f"the sample states the identifier {sample.header.id}")
        return sample

    def put(self, sample_id: str, sealed: bytes) -> None:
        """Store an encrypted file durably.

        Raises:
            OutputError: The file cannot be written. The caller can try again.
        """
        if self._bucket_url:
            self._bucket.write(self._name(sample_id), sealed, _CACHE)
            return
        path = self._path(sample_id)
        make_folders(path.parent, 0o700)
        with write_atomically(path, mode=0o600) as file:
            file.write(sealed)

    def read(self, sample_id: str) -> Sample:
        """Read and decrypt a sample.

        Raises:
            NotFoundError: The file is missing.
            DataError: See `unseal`.
            ConfigError: See `unseal`.
            OutputError: The bucket cannot be reached.
        """
        if self._bucket_url:
            sealed = self._bucket.read(self._name(sample_id))
        else:
            try:
                sealed = self._path(sample_id).read_bytes()
            except FileNotFoundError:
                sealed = None
        if sealed is None:
            raise NotFoundError(f"the file of sample {sample_id[:40]!r} is gone")
        return self.unseal(sample_id, sealed)

    def remove(self, sample_id: str) -> None:
        """Delete the file of a sample, if it exists.

        Raises:
            OutputError: The bucket cannot be reached. The caller can try again.
        """
        if self._bucket_url:
            self._bucket.remove(self._name(sample_id))
        else:
            self._path(sample_id).unlink(missing_ok=True)

    @functools.cached_property
    def _bucket(self) -> ArtifactStorage:
        return ArtifactStorage(self._bucket_url)

    @functools.cached_property
    def _key(self) -> "EllipticCurvePrivateKey":
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        path = self._folder.identity / _KEY
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as cause:
            raise ConfigError(
                f"{path}: cannot read a private key: {cause}; restore it from a backup"
            ) from cause
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ConfigError(f"{path}: is no key of P-256; restore it from a backup")
        return key

    @functools.cached_property
    def _point(self) -> bytes:
        from edgekit_runtime.encryption.key_wrapping import encode_point

        return encode_point(self._key.public_key())

    def _name(self, sample_id: str) -> str:
        if SAMPLE_ID.fullmatch(sample_id) is None:
            raise NotFoundError(f"there is no sample {sample_id[:40]!r}")
        return f"{_PREFIX}/{sample_id[:2]}/{sample_id}"

    def _path(self, sample_id: str) -> Path:
        return self._folder.path / self._name(sample_id)
