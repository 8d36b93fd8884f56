"""The lower sections of the page: steps, layers, source and data, and provenance."""

from collections.abc import Sequence

from edgekit_host.markup import Markup, el, facts, join, section, table
from edgekit_host.plots.bars import bar
from edgekit_toolkit.report.document import Load, Report, ReportedLayer, ReportedStep, ReportedTensor
from edgekit_toolkit.report.figures import show, show_macs, show_number
from edgekit_toolkit.report.page.pieces import (
    COUNTED,
    MEASURED,
    badge,
    bytes_change,
    code,
    name_cell,
    number,
)

TOP_LAYERS = 30
# The reason that the chain gives for a pass without a place to change.
NOTHING_TO_CHANGE = "nothing to change"


def steps(report: Report) -> Markup:
    """Return the section on the optimisation passes. Passes without changes are collapsed."""
    steps = report["steps"]
    if not steps:
        return section("Steps", el("p", "No step was run.", class_="empty"), key="steps")
    idle = [step for step in steps if step["reason"] == NOTHING_TO_CHANGE and not step["applied"]]
    effective = [step for step in steps if step not in idle]
    dropped = sum(not step["applied"] for step in effective)
    folded = None
    if idle:
        summary = f"{len(idle)} step{'s' if len(idle) > 1 else ''} had nothing to change"
        folded = el("details", el("summary", summary), _step_table(idle, "Steps without a change"))
    return section(
        "Steps",
        _step_table(effective, "Steps") if effective else None,
        folded,
        key="steps",
        intro=f"{len(effective) - dropped} applied, {dropped} dropped.",
    )


def _step_table(steps: Sequence[ReportedStep], caption: str) -> Markup:
    measured = badge(MEASURED)
    head = ("Step", "Result", "Reason", join("Largest error", measured), join("Size", measured), "Nodes")
    rows = [_step(step) for step in steps]
    return table(head, rows, numeric=frozenset({3, 4, 5}), caption=caption, style="steps")


def _step(step: ReportedStep) -> Markup:
    applied = step["applied"]
    idle = not applied and step["reason"] == NOTHING_TO_CHANGE
    result = "✔ applied" if applied else "· not needed" if idle else "✖ dropped"
    nodes = f"{step['nodes_before']:,} → {step['nodes_after']:,}"
    error = step["max_error"]
    return el(
        "tr",
        el("th", step["name"], scope="row", class_="name"),
        el(
            "td",
            el("span", result, class_="applied" if applied else "idle" if idle else "dropped"),
        ),
        el("td", step["reason"], class_="reason"),
        number("n/a" if error is None else show_error(error), style="missing" if error is None else ""),
        bytes_change(step["bytes_before"], step["bytes_after"]),
        number(nodes if step["nodes_before"] != step["nodes_after"] else f"{step['nodes_after']:,}"),
        class_="off" if not applied and not idle else None,
    )


def show_error(error: float) -> str:
    """Return a numeric error as text. 0 is shown as `0, equal`, and errors below 1e-3 with an exponent."""
    if error == 0:
        return "0, equal"
    return f"{error:.1e}" if error < 1e-3 else show_number(error)


def compression(report: Report) -> Markup:
    """Return a bar chart of the size after each step of compression. There must be at least one step."""
    steps = report["compression"]
    longest = max(1, *(step["bytes"] for step in steps))
    rows = [
        el(
            "tr",
            el("th", step["step"], scope="row", class_="name"),
            el("td", bar(step["bytes"] / longest, "after"), class_="b"),
            number(show(step["bytes"], "bytes")),
            number(f"{longest / max(step['bytes'], 1):.1f} x smaller" if number_of else ""),
        )
        for number_of, step in enumerate(steps)
    ]
    head = ("Step", "", join("Size", badge(MEASURED)), "Against the first")
    grid = table(head, rows, numeric=frozenset({2, 3}), caption="Size after each step", style="bars")
    return section("Compression", grid, key="compression")


def layers(report: Report) -> Markup:
    """Return the section on layers: a chart of the main layers, and a collapsed table of all layers."""
    layers = report["layers"]
    noise_samples = report["data"]["calibration"]["noise_samples"]
    if not layers:
        return section("Layers", el("p", "No layers were recorded.", class_="empty"), key="layers")
    return section(
        "Layers",
        el("div", _sensitivity(layers, noise_samples), _sizes(layers), class_="plots"),
        _all_layers(layers),
        key="layers",
    )


def _sensitivity(layers: Sequence[ReportedLayer], noise_samples: int) -> Markup:
    measured = [(layer["noise_share"], layer) for layer in layers if layer["noise_share"] is not None]
    caption = el("figcaption", el("b", "Sensitivity"), badge(MEASURED, title="noise") if measured else None)
    if not measured:
        return el("figure", caption, el("p", "Not measured in this run.", class_="empty"))
    measured.sort(key=lambda entry: -entry[0])
    shown_layers = measured[:TOP_LAYERS]
    largest, _ = shown_layers[0]
    longest = max(largest, 1e-9)
    rows = [
        el(
            "tr",
            name_cell(layer["name"], 34),
            el("td", _precision(layer["precision"])),
            el("td", bar(value / longest, "noise"), class_="b"),
            number(show(value, "share")),
        )
        for value, layer in shown_layers
    ]
    samples = f"{noise_samples:,} calibration sample{'' if noise_samples == 1 else 's'}"
    text = (
        f"Share of the output noise that each layer adds when it alone is quantized, measured on {samples}. "
        f"Top {len(shown_layers)} of {len(measured)} measured ({len(layers)} layers)."
    )
    head = ("Layer", "Now", "", "Noise")
    grid = table(head, rows, numeric=frozenset({3}), caption="Sensitivity by layer", style="bars")
    return el("figure", caption, el("p", text, class_="note"), grid)


def _sizes(layers: Sequence[ReportedLayer]) -> Markup:
    order = sorted(layers, key=lambda layer: -layer["bytes_before"])
    largest, smaller = order[:TOP_LAYERS], order[TOP_LAYERS:]
    longest = max(1, *(max(layer["bytes_before"], layer["bytes_after"]) for layer in largest))
    rows = [
        el(
            "tr",
            name_cell(layer["name"], 34),
            el("td", _precision(layer["precision"])),
            el(
                "td",
                bar(layer["bytes_after"] / longest, "after", back=layer["bytes_before"] / longest),
                class_="b",
            ),
            bytes_change(layer["bytes_before"], layer["bytes_after"]),
        )
        for layer in largest
    ]
    # Sums have no bar: on their scale the layers would vanish.
    if smaller:
        rows.append(_sum_row(f"{len(smaller)} other layers", smaller))
    rows.append(_sum_row(f"All {len(layers)} layers", layers))
    caption = el("figcaption", el("b", "Size by layer"), badge(MEASURED, title="bytes"))
    text = join(
        el("i", class_="key-before", aria_hidden="true"),
        "before ",
        el("i", class_="key-after", aria_hidden="true"),
        "after",
    )
    head = ("Layer", "Now", "", "Bytes")
    grid = table(head, rows, numeric=frozenset({3}), caption="Size by layer, before and after", style="bars")
    return el("figure", caption, el("p", text, class_="note key"), grid)


def _sum_row(title: str, layers: Sequence[ReportedLayer]) -> Markup:
    before = sum(layer["bytes_before"] for layer in layers)
    after = sum(layer["bytes_after"] for layer in layers)
    return el("tr", el("th", title, scope="row", colspan=3), bytes_change(before, after), class_="sum")


def _precision(precision: str) -> Markup:
    return el("span", precision, class_="chip")


def _layer_figures(layer: ReportedLayer) -> tuple[str, ...]:
    sizes = (f"{layer['bytes_before']:,}", f"{layer['bytes_after']:,}")
    return (*sizes, show_macs(layer["macs"]), show(layer["noise_share"], "share"))


def _all_layers(layers: Sequence[ReportedLayer]) -> Markup:
    rows = [
        el(
            "tr",
            name_cell(layer["name"], 70),
            el("td", layer["op"]),
            el("td", _precision(layer["precision"])),
            *map(number, _layer_figures(layer)),
        )
        for layer in layers
    ]
    measured = badge(MEASURED)
    head = (
        "Layer",
        "Operator",
        "Precision",
        join("Bytes before", measured),
        join("Bytes after", measured),
        join("MACs", badge(COUNTED)),
        join("Share of noise", measured),
    )
    grid = table(head, rows, numeric=frozenset({3, 4, 5, 6}), caption="All layers in graph order")
    return el("details", el("summary", f"All {len(layers)} layers in graph order"), grid)


def origin(report: Report) -> Markup:
    """Return the section on the source model, and on the calibration and evaluation samples."""
    source, data = report["source"], report["data"]
    calibration, evaluation = data["calibration"], data["evaluation"]
    model = facts(
        [
            ("File", code(source["file"])),
            ("Size", join(f"{source['bytes']:,} bytes ", badge(MEASURED))),
            ("SHA-256", code(source["sha256"])),
            ("Opset", "none: .tflite" if source["opset"] is None else str(source["opset"])),
            ("Graph", f"{source['nodes']:,} nodes, {source['parameters']:,} parameters"),
            ("Inputs", _tensors(source["inputs"])),
            ("Outputs", _tensors(source["outputs"])),
        ]
    )
    samples = facts(
        [
            ("Calibration", f"{calibration['samples']:,} samples, {calibration['kind']}"),
            ("Noise measured on", f"{calibration['noise_samples']:,} of them"),
            ("SHA-256", None if calibration["sha256"] is None else code(calibration["sha256"])),
            ("Evaluation", f"{evaluation['samples']:,} samples, {evaluation['kind']}"),
            ("SHA-256", None if evaluation["sha256"] is None else code(evaluation["sha256"])),
            ("Of them held back", f"{evaluation['held_back']:,}, which chose nothing"),
            ("Metric", f"{evaluation['title']} ({evaluation['metric']})"),
            ("Source's score", join(f"{show(evaluation['baseline'], 'share')} ", badge(MEASURED))),
        ]
    )
    return section(
        "Source and data",
        el(
            "div",
            el("div", el("h3", "Source model"), model),
            el("div", el("h3", "Data"), samples),
            class_="plots",
        ),
        key="source",
    )


def _tensors(tensors: Sequence[ReportedTensor]) -> Markup:
    lines = [
        el("div", code(f"{spec['name']}: {spec['dtype']} [{', '.join(str(size) for size in spec['shape'])}]"))
        for spec in tensors
    ]
    return join(*lines)


def provenance(report: Report) -> Markup:
    """Return the section on the files, the command, the tools, this machine and the time of each phase."""
    package, where = report["package"], report["provenance"]
    host = where["host"]
    files: list[tuple[str, str | None]] = [("Package", "none written")]
    if package is not None:
        files = [
            ("Package", code(package["file"])),
            ("Size", join(f"{package['bytes']:,} bytes ", badge(MEASURED))),
            ("SHA-256", code(package["sha256"])),
            ("Signing key", code(package["key_id"])),
        ]
    recipe, evidence = report["recipe"], report["evidence"]
    files += [
        ("Recipe", None if recipe is None else code(recipe)),
        ("Recipe SHA-256", None if where["recipe_sha256"] is None else code(where["recipe_sha256"])),
        ("Evidence", None if evidence is None else code(evidence)),
    ]
    machine = [
        ("Processor", f"{host['cpu']}, {host['cores']} cores"),
        ("8-bit products", f"{host['instruction_set']}, exact by {host['exact_products_by']}"),
        ("System", host["os"]),
        ("Python", host["python"]),
        ("Load while measuring", _load(where["load"])),
        *((name, version) for name, version in where["tools"].items()),
    ]
    files_part = el("div", el("h3", "Files"), facts(files), el("h3", "Command"), el("pre", report["command"]))
    time = join(el("h3", "Time by phase"), _phases(where["seconds"]))
    right = el("div", el("h3", "Host and tools"), facts(machine), time)
    return section(
        "Provenance",
        el("div", files_part, right, class_="plots"),
        key="provenance",
    )


def _load(load: Load) -> str:
    share, stolen = load["others_share"], load["stolen_share"]
    counted = "" if share is None else f"others used {show(share, 'share')}, "
    counted += "" if stolen is None else f"stolen {show(stolen, 'share')}, "
    return f"{counted}spread of runs {show(load['spread'], 'share')}"


def _phases(seconds: dict[str, float]) -> Markup:
    if not seconds:
        return el("p", "Not recorded.", class_="empty")
    longest = max(*seconds.values(), 1e-9)
    rows = [
        el(
            "tr",
            el("th", phase, scope="row", class_="name"),
            el("td", bar(value / longest, "after"), class_="b"),
            number(f"{value:.1f} s"),
        )
        for phase, value in seconds.items()
    ]
    rows.append(
        el(
            "tr",
            el("th", "Sum", scope="row", colspan=2),
            number(f"{sum(seconds.values()):.1f} s"),
            class_="sum",
        )
    )
    head = ("Phase", "", join("Seconds", badge(MEASURED)))
    return table(head, rows, numeric=frozenset({2}), caption="Time by phase", style="bars")
