"""Trains the tiny models and writes everything in this folder that is not source code.

    python models/tiny/train.py                      all four
    python models/tiny/train.py digits_cnn           one of them
    python models/tiny/train.py --validate           5-fold cross-validation, writes nothing

The held-out parts decide nothing: configurations were chosen by `--validate`, which sees only the
training part, and the number of epochs is fixed, so the last epoch's weights are the ones kept.
"""

import os

# Caps the kernels at AVX2 before torch loads them, so that a CPU with wider vectors, whose sums
# run in another order, does not train other weights.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}

import argparse
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import augment
import datasets
import export
import networks
import numpy as np
import torch
from augment import Augment
from datasets import Split
from torch import Tensor, nn

SEED = 1
FOLDS = 5
CALIBRATION_SAMPLES = 300
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides one model. The learning rate is the one-cycle schedule's peak."""

    load: Callable[[], Split]
    network: Callable[[], nn.Sequential]
    input_name: str
    classes: tuple[str, ...]
    augment: Augment
    epochs: int
    batch_size: int
    learning_rate: float = 5e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.05


DIGITS = tuple("0123456789")
RECIPES = {
    "mnist5k_dscnn": Recipe(
        load=datasets.load_mnist5k,
        network=networks.mnist5k_dscnn,
        input_name="image",
        classes=DIGITS,
        augment=augment.affine(rotation_deg=12, scale=0.15, shear=0.15, shift=0.15),
        epochs=80,
        batch_size=64,
    ),
    "digits_cnn": Recipe(
        load=datasets.load_digits,
        network=networks.digits_cnn,
        input_name="image",
        classes=DIGITS,
        augment=augment.affine(rotation_deg=8, scale=0.1, shear=0.1, shift=0.08),
        epochs=60,
        batch_size=32,
    ),
    "japanese_vowels_tcn": Recipe(
        load=datasets.load_japanese_vowels,
        network=networks.japanese_vowels_tcn,
        input_name="cepstra",
        classes=tuple(f"speaker {number}" for number in range(1, 10)),
        augment=augment.jitter(noise=0.3, offset=0.3),
        epochs=40,
        batch_size=32,
    ),
    "italy_power_mlp": Recipe(
        load=datasets.load_italy_power,
        network=networks.italy_power_mlp,
        input_name="demand",
        classes=("October to March", "April to September"),
        augment=augment.jitter(noise=0.4, offset=0.0),
        epochs=150,
        batch_size=16,
        weight_decay=0.01,
    ),
}


def fit(name: str, x: Tensor, y: Tensor) -> nn.Sequential:
    """The recipe's network trained on the samples, in evaluation mode.

    Args:
        name: The recipe.
        x: float32 [N, ...], the samples.
        y: int64 [N], their classes.
    """
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    network = recipe.network()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    # A last batch of a single sample would have no variance to normalise by.
    batches = len(x) // recipe.batch_size + (len(x) % recipe.batch_size > 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.epochs * batches, pct_start=0.2
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    started_s = time.monotonic()
    for epoch in range(1, recipe.epochs + 1):
        losses = []
        for chosen in torch.split(torch.randperm(len(x), generator=generator), recipe.batch_size)[:batches]:
            loss = criterion(network(recipe.augment(x[chosen], generator)), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if epoch % 10 == 0 or epoch == recipe.epochs:
            elapsed_s = time.monotonic() - started_s
            print(f"{name}: epoch {epoch}/{recipe.epochs}, loss {np.mean(losses):.4f}, {elapsed_s:.0f} s")
    return network.eval()


def validate(name: str) -> None:
    split = RECIPES[name].load()
    x, y = torch.from_numpy(split.train_x), torch.from_numpy(split.train_y)
    fold = np.empty(len(y), dtype=np.int64)
    rng = np.random.default_rng(SEED)
    for label in np.unique(split.train_y):
        members = rng.permutation(np.flatnonzero(split.train_y == label))
        fold[members] = np.arange(len(members)) % FOLDS
    correct = 0
    for left_out in range(FOLDS):
        network = fit(name, x[fold != left_out], y[fold != left_out])
        with torch.no_grad():
            correct += int((network(x[fold == left_out]).argmax(1) == y[fold == left_out]).sum())
    print(f"{name}: {FOLDS}-fold cross-validation {100 * correct / len(y):.2f} % ({correct}/{len(y)})")


def train(name: str) -> dict[str, Any]:
    """Train on the whole training part and write the model and its data; returns its record."""
    recipe = RECIPES[name]
    split = recipe.load()
    network = fit(name, torch.from_numpy(split.train_x), torch.from_numpy(split.train_y))
    model = export.to_onnx(network, recipe.input_name, split.train_x.shape[1:])
    chosen = np.random.default_rng(SEED).permutation(len(split.train_x))[:CALIBRATION_SAMPLES]
    calibration = split.train_x[np.sort(chosen)]
    contents = {
        "model": (f"{name}.onnx", model),
        "eval": (f"{name}.eval.npz", export.npz_bytes({recipe.input_name: split.eval_x, "y": split.eval_y})),
        "calib": (f"{name}.calib.npz", export.npz_bytes({recipe.input_name: calibration})),
    }
    for path, content in contents.values():
        (FOLDER / path).write_bytes(content)
    correct = export.count_correct(model, recipe.input_name, split.eval_x, split.eval_y)
    print(f"{name}: held out {100 * correct / len(split.eval_y):.2f} % ({correct}/{len(split.eval_y)})")
    return {
        "architecture": _first_line(recipe.network),
        "parameters": export.count_weights(model),
        "input": {"name": recipe.input_name, "dtype": "float32", "shape": ["N", *split.eval_x.shape[1:]]},
        "output": {"name": export.OUTPUT_NAME, "dtype": "float32", "shape": ["N", len(recipe.classes)]},
        "classes": list(recipe.classes),
        "eval": {"samples": len(split.eval_y), "correct": correct},
        "calib": {"samples": len(calibration)},
        "files": {
            role: {"path": path, "bytes": len(content), "sha256": export.sha256(content)}
            for role, (path, content) in contents.items()
        },
    }


def _first_line(function: Callable[..., Any]) -> str:
    """What the function's docstring says before its first colon."""
    return (function.__doc__ or "").partition(":")[0]


def main() -> None:
    """Command line: no name means every model."""
    parser = argparse.ArgumentParser(description="Train the tiny models (one thread, fixed seed).")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(RECIPES)}")
    parser.add_argument("--validate", action="store_true", help="cross-validate instead; writes nothing")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(RECIPES))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; expected {', '.join(RECIPES)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress also shows through a pipe
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in arguments.names or RECIPES:
        if arguments.validate:
            validate(name)
        else:
            export.update_records(FOLDER, {name: train(name)})


if __name__ == "__main__":
    main()
