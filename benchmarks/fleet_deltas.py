"""How small deltas of packages are after real fine-tuning, beside bsdiff4 and zstd.

    python benchmarks/fleet_deltas.py --python .venv-train/bin/python                  three models, 7 minutes
    python benchmarks/fleet_deltas.py --python .venv-train/bin/python NAME             another one

Each model is trained by models/tiny/train.py, fine-tuned on its training part at three strengths (all layers,
AdamW), and packaged like its first version (`edgekit package --like`). `--python` is an environment made as
models/tiny/README.md says, with `pip install bsdiff4==1.3.2` on top.
"""

import telemetry_off  # noqa: F401

import argparse
import copy
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import write_json

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
SIZE = 0.47
"""Largest package, as a share of the float model: all large layers are int8."""
STRENGTHS = {"light": (1, 2e-5), "medium": (1, 1e-4), "heavy": (10, 1e-3)}
"""Epochs and learning rate; training itself peaks at 5e-3."""


def tune(name: str, folder: Path) -> None:
    """Train and fine-tune a model; runs where torch is."""
    sys.path.insert(0, str(TINY))
    import export  # type: ignore[import-not-found]
    import torch
    import train  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    recipe = train.RECIPES[name]
    split = recipe.load()
    x, y = torch.from_numpy(split.train_x), torch.from_numpy(split.train_y)
    first = train.fit(name, x, y)
    for strength, (epochs, rate) in {"base": (0, 0.0), **STRENGTHS}.items():
        network = copy.deepcopy(first).train()
        generator = torch.Generator().manual_seed(2)
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=recipe.weight_decay)
        criterion = torch.nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        for _ in range(epochs):
            order = torch.randperm(len(x), generator=generator)
            for chosen in torch.split(order, recipe.batch_size):
                if len(chosen) > 1:
                    loss = criterion(network(recipe.augment(x[chosen], generator)), y[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        model = export.to_onnx(network.eval(), recipe.input_name, split.train_x.shape[1:])
        (folder / f"{name}.{strength}.onnx").write_bytes(model)


def compare(folder: Path) -> None:
    """Print what bsdiff4 makes of the packages in a folder; runs where it is."""
    import bsdiff4

    base = (folder / "base.edgepkg").read_bytes()
    sizes = {each: len(bsdiff4.diff(base, (folder / f"{each}.edgepkg").read_bytes())) for each in STRENGTHS}
    print(json.dumps(sizes))


def package(name: str, backend: str, models: Path, folder: Path) -> None:
    folder.mkdir()
    options = ["--name", name, "-t", "x86-64", "--backend", backend, "--search-seconds", "3"]
    size_kb = SIZE * (models / f"{name}.base.onnx").stat().st_size / 1000
    options += ["-b", f"size={size_kb:.0f}kB,drop=5%"]
    options += ["--calibration", str(TINY / f"{name}.calib.npz"), "--eval", str(TINY / f"{name}.eval.npz")]
    like: list[str] = []
    for strength in ("base", *STRENGTHS):
        made = folder / f"of-{strength}"
        command = [str(ROOT / "edgekit"), "package", str(models / f"{name}.{strength}.onnx"), *options, *like]
        subprocess.run([*command, "-o", str(made)], check=True, stdout=subprocess.DEVNULL)
        shutil.copy(next(made.glob("*.edgepkg")), folder / f"{strength}.edgepkg")
        shutil.copy(next(made.glob("*.recipe.json")), folder / f"{strength}.recipe.json")
        like = like or ["--version", "1.1.0", "--like", str(next(made.glob("*.recipe.json")))]


def measure(folder: Path, bsdiff: dict[str, int]) -> list[dict[str, object]]:
    import numpy as np

    from edgekit_fleet.releases import deltas

    rows = []
    base = folder / "base.edgepkg"
    for strength in STRENGTHS:
        new = folder / f"{strength}.edgepkg"
        old_bytes, new_bytes = base.read_bytes(), new.read_bytes()
        started_s = time.perf_counter()
        made = deltas.make_delta(old_bytes, new_bytes)  # None unless it makes the package byte for byte
        seconds = time.perf_counter() - started_s
        least = min(len(old_bytes), len(new_bytes))
        changed = np.frombuffer(old_bytes, np.uint8)[:least] != np.frombuffer(new_bytes, np.uint8)[:least]
        score = json.loads((folder / f"{strength}.recipe.json").read_text())["figures"]["score"]
        rows.append(
            {
                "strength": strength,
                "score": score["value"],
                "source_score": score["source_value"],
                "base_bytes": len(old_bytes),
                "package_bytes": len(new_bytes),
                "changed": float(changed.mean()),
                "delta": None if made is None else len(made[1]) / len(new_bytes),
                "kind": "full" if made is None else made[0],
                "zstd": len(deltas._make_zstd_delta(old_bytes, new_bytes)) / len(new_bytes),
                "bsdiff4": bsdiff[strength] / len(new_bytes),
                "seconds": seconds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["japanese_vowels_tcn", "digits_cnn", "mnist5k_dscnn"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", type=Path, help="interpreter that has torch and bsdiff4")
    parser.add_argument("--tune", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tune:
        tune(arguments.tune[0], Path(arguments.tune[1]))
        return
    if arguments.compare:
        compare(arguments.compare)
        return
    if arguments.python is None:
        parser.error("--python is missing: an environment with torch and bsdiff4")
    again = [str(arguments.python.absolute()), "-W", "ignore", str(Path(__file__))]
    found = []
    print(
        "model engine strength: base, package bytes; bytes changed; delta, zstd, bsdiff4 as share;"
        " score here and of the float model; seconds"
    )
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as temporary:
            subprocess.run([*again, "--tune", name, temporary], check=True, stdout=subprocess.DEVNULL)
            for backend in ("ort", "litert"):
                folder = Path(temporary) / backend
                package(name, backend, Path(temporary), folder)
                compared = subprocess.run([*again, "--compare", str(folder)], check=True, capture_output=True)
                for row in measure(folder, json.loads(compared.stdout)):
                    found.append({"model": name, "engine": backend, **row})
                    shown = "-" if row["delta"] is None else f"{row['delta']:.3f} ({row['kind']})"
                    print(
                        f"{name} {backend} {row['strength']}: {row['base_bytes']:,} {row['package_bytes']:,};"
                        f" {row['changed']:.0%}; {shown} {row['zstd']:.3f} {row['bsdiff4']:.3f};"
                        f" {row['score']:.4f} {row['source_score']:.4f}; {row['seconds']:.2f} s",
                        flush=True,
                    )
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
