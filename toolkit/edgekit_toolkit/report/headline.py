"""The headline of a report, with the size, accuracy and latency of the package compared with its source."""

from edgekit_toolkit.report.document import Accuracy, LatencyToFloat, Report
from edgekit_toolkit.report.figures import count_samples

# A smaller drop does not show in two decimals.
_NO_DROP_POINTS = 0.005
# A ratio closer to 1 reads 1.0 with one decimal.
_SAME_SIZE = 0.05


def headline(report: Report) -> str | None:
    """Return a line on the size, accuracy and latency of the package, or None without a package.

    For example `2.6 x smaller, same top-1 accuracy on 500 samples (±0.8 points), 0.45 x the latency of
    float32 (modelled)`.
    """
    package, ratio = report["package"], report["outcome"]["latency_to_float"]
    if package is None:
        return None
    source_bytes = report["source"]["bytes"]
    parts = [_size(source_bytes, package["bytes"])]
    transport = next((line["value"] for line in report["budget"] if line["limit"] == "transport"), None)
    if transport is not None and transport < (1 - _SAME_SIZE) * package["bytes"]:
        parts[0] = f"{_size(source_bytes, transport)} on its way, {parts[0]} on the device"
    parts.append(_accuracy(report["accuracy"]))
    if ratio is not None:
        parts.append(_latency(ratio))
    if slower := report["outcome"]["slower_than"]:
        parts.append(f"slower than float32 to keep every limit ({slower})")
    return ", ".join(part for part in parts if part)


def _size(source_bytes: int, package_bytes: float) -> str:
    if abs(package_bytes / source_bytes - 1) < _SAME_SIZE:
        return "same size"
    if package_bytes < source_bytes:
        return f"{source_bytes / package_bytes:.1f} x smaller"
    return f"{package_bytes / source_bytes:.1f} x larger"


def _accuracy(accuracy: Accuracy) -> str:
    drop, points, title = accuracy["drop"], accuracy["drop_points"], accuracy["title"]
    if drop is None or points is None:
        return "accuracy not checked"
    low, high = drop["interval"]
    samples = count_samples(drop)
    if accuracy["state"] == "not resolved":
        return f"drop of {title} not resolved by {samples} ({low:.1f} to {high:.1f} points)"
    reach = f"on {samples} (±{max(high - points, points - low):.1f} points)"
    if abs(points) < _NO_DROP_POINTS:
        return f"same {title} {reach}"
    return f"{title} {abs(points):.2f} points {'lower' if points > 0 else 'higher'} {reach}"


def _latency(ratio: LatencyToFloat) -> str:
    modelled, here = ratio["modelled"], ratio["measured"]["value"]
    if modelled["value"] is not None:
        return f"{modelled['value']:.2f} x the latency of float32 ({modelled['label']})"
    return "" if here is None else f"{here:.2f} x the latency of float32 (measured here)"
