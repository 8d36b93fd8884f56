"""Builds report documents like those of real runs; the figures are invented, their proportions are not."""

import copy
import hashlib
import random
from typing import Any

COMMAND = (
    "edgekit package efficientnet_lite0_fp32.onnx --target rpi5 --max-size 10MB --max-latency 40ms "
    "--max-memory 64MB --max-drop 1 --calibration photos.npz --evaluation labelled.npz"
)
SOURCE_BYTES = 18_611_942
BASELINE = 0.888


def classified(name: str, score: float) -> dict[str, Any]:
    """Return a sample of a classification: the package is a little less sure."""
    answers = [{"classes": [{"label": "cat", "index": 3, "score": value}]} for value in (score, score - 0.01)]
    return {"name": name, "width": None, "height": None, "float": answers[0], "package": answers[1]}


def _figure(value: float | None, label: str, on: str) -> dict[str, Any]:
    return {"value": value, "label": label, "on": on}


def _drop(points: float) -> dict[str, Any]:
    return {
        "interval": [round(points - 0.9, 4), round(points + 1.1, 4)],
        "confidence": 0.95,
        "samples": 250,
        "held_back": True,
        "resolved": not points - 0.9 <= 1 < points + 1.1,
    }


def _candidate(
    index: int, label: str, size: int, latency: float, score: float, precision: dict[str, int]
) -> dict[str, Any]:
    drop = round(100 * (BASELINE - score), 4)
    broken = (("size", size > 10e6), ("latency", latency > 40), ("drop", drop > 1.0))
    violations = [name for name, over in broken if over]
    return {
        "id": f"C{index}",
        "label": label,
        "chosen": False,
        "pareto": True,
        "meets": not violations,
        "figures": {
            "size": _figure(size, "measured", "host"),
            "latency": _figure(latency, "estimated", "rpi5"),
            "host_latency": _figure(round(latency * 0.31, 3), "measured", "host"),
            "memory": _figure(size + 9_800_000, "modelled", "rpi5"),
            "energy": _figure(None, "estimated", "rpi5"),
            "score": _figure(score, "measured", "host"),
            "drop": _figure(drop, "measured", "host"),
        },
        "drop": _drop(drop),
        "violations": violations,
        "precision": precision,
    }


def _candidates() -> list[dict[str, Any]]:
    rows: list[tuple[str, int, float, float, dict[str, int]]] = [
        ("float32, optimised", 18_604_102, 61.0, 0.888, {"int8": 0, "fp16": 0, "fp32": 64}),
        ("float16 weights", 9_360_224, 61.8, 0.888, {"int8": 0, "fp16": 64, "fp32": 0}),
        ("int8 weights, per channel", 4_930_118, 63.4, 0.885, {"int8": 64, "fp16": 0, "fp32": 0}),
        ("int8 per tensor", 4_812_340, 22.6, 0.816, {"int8": 64, "fp16": 0, "fp32": 0}),
        ("int8 per channel", 5_101_776, 23.1, 0.876, {"int8": 64, "fp16": 0, "fp32": 0}),
        ("int8 per channel mixed, 3 layers float", 5_243_010, 24.9, 0.88, {"int8": 61, "fp16": 0, "fp32": 3}),
        (
            "int8 per channel mixed, 5 layers float",
            5_310_004,
            25.6,
            0.882,
            {"int8": 59, "fp16": 0, "fp32": 5},
        ),
        ("int8 per channel, percentile ranges", 5_101_776, 23.1, 0.873, {"int8": 64, "fp16": 0, "fp32": 0}),
        ("int8 per tensor, last 2 layers float", 9_905_600, 27.9, 0.829, {"int8": 62, "fp16": 0, "fp32": 2}),
    ]
    found = [_candidate(index, *row) for index, row in enumerate(rows)]
    for index in (0, 7, 8):
        found[index]["pareto"] = False
    found[5]["chosen"] = True
    return found


def layers(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Return `count` layers with names as exporters write them."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        fully = index == count - 1
        weights = 1280 * 1000 if fully else draw.choice((864, 3_456, 27_648, 55_296, 98_304, 147_456))
        precision = "fp32" if index in (0, 3, 40) else "int8"
        found.append(
            {
                "name": "/classifier/classifier.1/Gemm"
                if fully
                else f"/blocks/blocks.{index // 4}/blocks.{index // 4}.{index % 4}/conv_{index}/Conv",
                "op": "Gemm" if fully else "Conv",
                "bytes_before": 4 * weights,
                "bytes_after": 4 * weights if precision == "fp32" else weights + 512,
                "precision": precision,
                "macs": weights * draw.choice((49, 196, 784)),
                "noise_share": None if index % 5 == 4 else draw.expovariate(0.9),
            }
        )
    total = sum(layer["noise_share"] or 0.0 for layer in found)
    for layer in found:
        if layer["noise_share"] is not None:
            layer["noise_share"] /= total
    return found


def _steps() -> list[dict[str, Any]]:
    rows: list[tuple[str, bool, str, float | None, int, int, int, int]] = [
        ("fold-constants", True, "outputs equal", 0.0, SOURCE_BYTES, 18_608_876, 163, 147),
        ("fuse-batchnorm", True, "within tolerance 1e-4", 3.1e-6, 18_608_876, 18_604_410, 147, 98),
        ("merge-duplicates", True, "outputs equal", 0.0, 18_604_410, 18_604_102, 98, 98),
        (
            "fuse-hardswish",
            False,
            "outputs differ by 4.2e-2, tolerance 1e-3, at 'logits': step taken back",
            4.2e-2,
            18_604_102,
            18_604_102,
            98,
            98,
        ),
        (
            "prune-channels",
            False,
            "not offered: no channel under the threshold",
            None,
            *[18_604_102] * 2,
            98,
            98,
        ),
        ("quantize", True, "score within the drop limit", 0.183, 18_604_102, 5_243_010, 98, 231),
    ]
    names = (
        "name",
        "applied",
        "reason",
        "max_error",
        "bytes_before",
        "bytes_after",
        "nodes_before",
        "nodes_after",
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def packaged() -> dict[str, Any]:
    """Return a report of a run that ended in a package, with two warnings."""
    return {
        "schema": "https://edgekit.dev/report/v1",
        "edgekit": "0.1.0",
        "created": "2025-03-14T09:26:53Z",
        "command": COMMAND,
        "name": "efficientnet-lite0",
        "version": "1.2.0",
        "target": {
            "name": "rpi5",
            "title": "Raspberry Pi 5",
            "backend": "onnxruntime",
            "form": "QDQ int8",
            "power_mode": None,
            "cost_source": "coefficients of rpi5",
        },
        "source": {
            "file": "efficientnet_lite0_fp32.onnx",
            "sha256": _digest("source"),
            "bytes": SOURCE_BYTES,
            "opset": 13,
            "nodes": 163,
            "parameters": 4_652_008,
            "inputs": [{"name": "images", "dtype": "float32", "shape": ["batch", 3, 224, 224]}],
            "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 1000]}],
        },
        "warnings": [
            "Latency and memory on rpi5 come from its profile: measure there before you rely on them.",
            "The drop was judged on 500 samples: one sample is 0.20 points.",
        ],
        "data": {
            "calibration": {
                "kind": "user",
                "samples": 200,
                "sha256": _digest("calibration"),
                "noise_samples": 16,
            },
            "evaluation": {
                "kind": "user",
                "samples": 500,
                "held_back": 250,
                "sha256": _digest("evaluation"),
                "metric": "top1",
                "title": "top-1 accuracy",
                "baseline": BASELINE,
                "field_samples": 0,
            },
        },
        "steps": _steps(),
        "sizes": [{"name": "N", "size": 1, "from": "assumed"}, {"name": "H", "size": 224, "from": "samples"}],
        "candidates": _candidates(),
        "set_aside": ["int8 per channel equalized (0.4 dB more noise than int8 per channel)"],
        "tournament": [],
        "variants": [
            {
                "name": "ort-static-int8",
                "backend": "ort",
                "label": "int8 per channel mixed, 5 layers float",
                "figures": _candidates()[6]["figures"],
                "drop": _candidates()[6]["drop"],
            }
        ],
        "budget": [
            _line("size", 10e6, "bytes", 5_243_010, "measured"),
            _line("latency", 40, "ms", 24.9, "estimated"),
            _line("memory", 64e6, "bytes", 15_043_010, "modelled"),
            _line("drop", 1.0, "points", 0.8, "measured", "not resolved"),
        ],
        "accuracy": {
            "state": "not resolved",
            "metric": "top1",
            "title": "top-1 accuracy",
            "limit": 1.0,
            "score": 0.88,
            "baseline": BASELINE,
            "drop_points": 0.8,
            "drop": _drop(0.8),
            "samples_needed": 15_100,
        },
        "outcome": {
            "kind": "packaged",
            "chosen": "C5",
            "reason": "Smallest of 2 candidates that meet all limits; the drop leaves out C3, C4, C7 and C8.",
            "binding": ["drop"],
            "closest": None,
            "needed": None,
            "slower_than": "",
            "latency_to_float": {
                "modelled": _figure(0.41, "modelled", "rpi5"),
                "uncertainty": 1.4,
                "measured": _figure(0.47, "measured", "host"),
                "measured_to_source": _figure(0.45, "measured", "host"),
            },
        },
        "proof": {"engine": "onnxruntime 1.24.4", "device_engine": "onnxruntime 1.24.4", "note": ""},
        "task": {
            "name": "classification",
            "options": {"scores": "probabilities"},
            "text": "classification:scores=probabilities, proposed by the outputs; --task changes it",
        },
        "samples": [classified(f"{number}.jpg", 0.9 - number / 10) for number in range(3)],
        "compression": [],
        "layers": layers(64),
        "package": {
            "file": "efficientnet-lite0-1.2.0-rpi5.edgepkg",
            "bytes": 5_243_010,
            "sha256": _digest("package"),
            "key_id": _digest("key"),
        },
        "recipe": "efficientnet-lite0-1.2.0-rpi5.recipe.json",
        "evidence": "efficientnet-lite0-1.2.0-rpi5.evidence.json",
        "provenance": {
            "tools": {"onnx": "1.23.0", "onnxruntime": "1.31.0", "onnxoptimizer": "0.4.2", "numpy": "2.3.1"},
            "host": {
                "cpu": "x86-64 with AVX2",
                "instruction_set": "avx2",
                "exact_products_by": "session.x64quantprecision=1",
                "cores": 2,
                "os": "Linux 6.1",
                "python": "3.11.2",
            },
            "load": {
                "cores": 2,
                "load_average": 1.2,
                "others_share": 0.03,
                "stolen_share": 0.0,
                "spread": 0.04,
            },
            "seconds": {"import": 0.8, "optimise": 6.2, "calibrate": 21.7, "search": 143.9, "pack": 1.3},
            "recipe_sha256": _digest("recipe"),
        },
    }


def _line(
    limit: str, maximum: float, unit: str, value: float | None, label: str, state: str = "ok"
) -> dict[str, Any]:
    if value is None or value > maximum:
        state = "over"
    high = None if value is None or limit != "drop" else round(value + 1.1, 4)
    line = {"limit": limit, "max": maximum, "unit": unit, "value": value, "high": high}
    return {**line, "label": label, "state": state}


def refused() -> dict[str, Any]:
    """Return a report of the same run with a size limit of 5 MB, which no candidate meets at that drop."""
    report = packaged()
    for candidate in report["candidates"]:
        candidate["chosen"] = False
        if candidate["figures"]["size"]["value"] > 5e6 and "size" not in candidate["violations"]:
            candidate["violations"].insert(0, "size")
        candidate["meets"] = not candidate["violations"]
    report["budget"] = [
        _line("size", 5e6, "bytes", 5_243_010, "measured"),
        _line("latency", 40, "ms", 24.9, "estimated"),
        _line("drop", 1.0, "points", 0.8, "measured"),
    ]
    report["outcome"] = {
        "kind": "refused",
        "chosen": None,
        "reason": "No candidate meets all limits: those under 5 MB are too slow or lose more than 1 point.",
        "binding": ["size"],
        "closest": "C5",
        "needed": "A size limit of 5.25 MB at this drop, or a drop limit of 7.2 points at this size.",
        "slower_than": "",
        "latency_to_float": None,
    }
    report["package"] = report["recipe"] = report["evidence"] = None
    report["provenance"]["recipe_sha256"] = None
    return report


def bare() -> dict[str, Any]:
    """Return the least that the schema allows: one candidate, nulls and empty lists wherever they may be."""
    report = copy.deepcopy(packaged())
    only = report["candidates"][0]
    for name, figure in only["figures"].items():
        figure["value"] = None if name != "size" else figure["value"]
    only.update(chosen=True, pareto=True, meets=True, violations=[], precision={})
    report.update(
        candidates=[only],
        warnings=[],
        set_aside=[],
        tournament=[],
        variants=[],
        steps=[],
        budget=[],
        layers=[],
        recipe=None,
        evidence=None,
    )
    report["outcome"].update(chosen="C0", binding=[])
    report["package"] = None
    report["data"]["calibration"]["sha256"] = report["data"]["evaluation"]["sha256"] = None
    report["provenance"].update(seconds={}, tools={}, recipe_sha256=None)
    return report
