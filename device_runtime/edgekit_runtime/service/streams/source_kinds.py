"""The kinds of sources that a stream can read. The capture process opens the sources.

For example, `find_kind(SOURCES, "rtsp://camera/1").open(options)` returns a `Capture`. Each call of its
`read` returns the next frame.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import MAX_RATE, StreamOptions, hide_password
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.install_hint import install_command

_PICTURES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_ADDRESSES: Final = ("rtsp://", "rtsps://", "http://", "https://")
_PIPELINE: Final = "gstreamer:"
_MICROPHONE: Final = "microphone"


class CaptureError(Exception):
    """A source cannot be opened or read, and a retry would not help."""


class Capture(Protocol):
    """An open source.

    Attributes:
        fps: The number of frames per second that the source states, or 0.
        rate: The number of sound samples per second, or 0 for frames.
    """

    fps: float
    rate: int

    def read(self) -> NDArray[Any] | None:
        """Return the next frame or window of sound, or None at the end.

        The array is uint8 [height, width, 3] in BGR, uint8 [height, width], or float32 [samples].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressKind:
    """A kind of source or sink.

    Attributes:
        form: The format of its addresses, for documentation and messages.
        matches: Returns whether a text is an address of this kind.
        writes_files: Whether the source or sink can write any file that the user of the service can write.
    """

    form: str
    matches: Callable[[str], bool]
    writes_files: bool = False


AnyKind = TypeVar("AnyKind", bound=AddressKind)


def find_kind(kinds: Sequence[AnyKind], text: str) -> AnyKind:
    """Return the first kind that matches an address.

    Raises:
        ConfigError: No kind matches the address.
    """
    for kind in kinds:
        if kind.matches(text):
            return kind
    forms = "; ".join(kind.form for kind in kinds)
    raise ConfigError(f"{hide_password(text)[:60]!r} is no source or sink here, expected one of: {forms}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind(AddressKind):
    """A kind of source.

    Attributes:
        open: A function that opens the source in the capture process. It raises `CaptureError` if a retry
            would not help, else another error.
        is_endless: Whether the source has no end, like a camera. If it ends, it is reopened.
        waits: Whether the source waits for the model by default, instead of dropping frames.
    """

    open: Callable[[StreamOptions], Capture]
    is_endless: bool = False
    waits: bool = False

    def keeps_all(self, options: StreamOptions) -> bool:
        """Return whether the source waits for the model, so that no frames are dropped."""
        stated = self.waits if options.all_frames is None else options.all_frames
        return stated and not self.is_endless


class _Video:
    """A source that OpenCV reads, such as a camera, file, address or pipeline."""

    rate = 0

    def __init__(self, options: StreamOptions, source: "str | int", backend: int, *further: int) -> None:
        cv2 = _import_cv2()
        # Frames of 10 GB are refused by the header, before a decoder takes memory for them.
        self._video = cv2.VideoCapture(source, backend, [*further])
        if not self._video.isOpened():
            raise OSError(f"{options.source} cannot be opened")
        width, height, fps = (
            self._video.get(prop)
            for prop in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FPS)
        )
        if backend == cv2.CAP_FFMPEG and not width * height:  # as of a frame that no decoder would take
            raise OSError(f"{options.source} states no size of its frames")
        if width * height > options.max_pixels:
            raise OSError(f"frames have {width:.0f} x {height:.0f} pixels, over {options.max_pixels}")
        self.fps = fps if 0 < fps <= 1000 else 0.0

    def read(self) -> NDArray[Any] | None:
        has_frame, frame = self._video.read()
        return frame if has_frame else None


class _Pictures:
    fps, rate = 0.0, 0

    def __init__(self, options: StreamOptions) -> None:
        self._cv2, self._options, self._is_empty = _import_cv2(), options, True
        names = sorted(Path(options.source).iterdir())
        self._paths = iter([path for path in names if path.suffix.lower() in _PICTURES and path.is_file()])

    def read(self) -> NDArray[Any] | None:
        for path in self._paths:
            picture: NDArray[Any] | None = None
            try:
                content = np.fromfile(
                    path, np.uint8
                )  # not by OpenCV, which crashes on names that are no UTF-8
            except OSError:  # removed meanwhile, or not readable
                continue
            try:
                if content.size:
                    picture = self._cv2.imdecode(content, self._cv2.IMREAD_COLOR)
            except self._cv2.error as cause:
                most = self._options.max_pixels
                raise CaptureError(f"{path} has more than {most} pixels, or is damaged") from cause
            if picture is not None:
                self._is_empty = False
                return picture
        if self._is_empty:
            endings = ", ".join(sorted(_PICTURES))
            raise CaptureError(f"{self._options.source} holds no picture that can be read: {endings}")
        return None


class _Windows:
    """Sound in windows of `window_s` seconds, of which the last `hop_s` seconds are new."""

    fps = 0.0

    def __init__(self, options: StreamOptions, rate: int, read: Callable[[int], NDArray[np.float32]]) -> None:
        """Create windows. `read` returns the given number of samples, or fewer only at the end."""
        self.rate, self._read = rate, read
        hop_s = options.window_s / 2 if options.hop_s is None else options.hop_s
        self._hop = max(1, round(hop_s * rate))
        self._window = np.zeros(max(self._hop, round(options.window_s * rate)), np.float32)
        self.fps = rate / self._hop

    def read(self) -> NDArray[Any] | None:
        fresh = self._read(self._hop)
        if not len(fresh):
            return None
        silence = np.zeros(self._hop - len(fresh), np.float32)  # behind the end
        self._window = np.concatenate([self._window[self._hop :], fresh, silence])
        return self._window


def _open_camera(options: StreamOptions) -> Capture:
    cv2 = _import_cv2()
    number = options.source.removeprefix("/dev/video")
    if not number.isdecimal():
        raise CaptureError(f"{options.source} is no camera, expected its number or /dev/videoN")
    return _Video(options, int(number), cv2.CAP_V4L2, cv2.CAP_PROP_BUFFERSIZE, 1)


def _open_address(options: StreamOptions) -> Capture:
    return _Video(options, options.source, _import_cv2().CAP_FFMPEG)


def _open_pipeline(options: StreamOptions) -> Capture:
    cv2 = _import_cv2()
    if not cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER):
        raise CaptureError(
            "this OpenCV is built without GStreamer, as those from PyPI are; install the system's"
            " (Debian: python3-opencv) or build one with it"
        )
    return _Video(options, options.source.removeprefix(_PIPELINE).strip(), cv2.CAP_GSTREAMER)


def _open_file(options: StreamOptions) -> Capture:
    _check_file(options.source)
    return _Video(options, options.source, _import_cv2().CAP_FFMPEG)


def _open_microphone(options: StreamOptions) -> Capture:
    if importlib.util.find_spec("sounddevice") is None:
        raise CaptureError("a microphone needs the package sounddevice: pip install sounddevice")
    import sounddevice

    name = options.source.removeprefix(_MICROPHONE).removeprefix(":")
    device = int(name) if name.isdecimal() else name or None
    sound = sounddevice.InputStream(device=device, samplerate=options.rate, channels=1, dtype="float32")
    sound.start()
    return _Windows(options, options.rate, lambda count: sound.read(count)[0][:, 0])


def _open_wav(options: StreamOptions) -> Capture:
    from edgekit_runtime.preprocessing.wav import WavFile

    _check_file(options.source)
    file = WavFile(Path(options.source).open("rb"), options.source)  # noqa: SIM115  # until this process ends
    if not 1000 <= file.rate <= MAX_RATE:
        raise CaptureError(f"{options.source} has {file.rate} Hz, expected 1 to 192 kHz")
    return _Windows(options, file.rate, file.read)


SOURCES: Final = (
    SourceKind(
        form="0, 1 or /dev/videoN, a camera",
        matches=lambda source: source.isdecimal() or source.startswith("/dev/video"),
        open=_open_camera,
        is_endless=True,
    ),
    SourceKind(
        form="rtsp://… or http://…, a camera in the network",
        matches=lambda source: source.startswith(_ADDRESSES),
        open=_open_address,
        is_endless=True,
    ),
    SourceKind(
        form="gstreamer:PIPELINE ! appsink",
        matches=lambda source: source.startswith(_PIPELINE),
        open=_open_pipeline,
        is_endless=True,
        writes_files=True,  # by elements such as filesink
    ),
    SourceKind(
        form="microphone or microphone:NAME",
        matches=lambda source: source.partition(":")[0] == _MICROPHONE,
        open=_open_microphone,
        is_endless=True,
    ),
    SourceKind(
        form="a WAV file",
        matches=lambda source: source.lower().endswith(".wav"),
        open=_open_wav,
        waits=True,
    ),
    SourceKind(form="a folder of pictures", matches=os.path.isdir, open=_Pictures, waits=True),
    SourceKind(form="a video file", matches=lambda source: "://" not in source, open=_open_file),
)


def _check_file(source: str) -> None:
    if not Path(source).is_file():
        raise CaptureError(f"there is no file {source}")


def _import_cv2() -> Any:
    """Return OpenCV, set to decode on one thread.

    Raises:
        CaptureError: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as cause:
        raise CaptureError(f"cameras and videos need OpenCV: {install_command('stream')}") from cause
    cv2.setNumThreads(1)
    return cv2
