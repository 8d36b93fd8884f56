"""The further variants of a package, as a table and as lines of text."""

from edgekit_host.markup import Markup, el, join, table
from edgekit_toolkit.report.document import CarriedVariant
from edgekit_toolkit.report.figures import FIGURES, show, show_drop
from edgekit_toolkit.report.page.pieces import figure_cell

_FIGURE_NAMES = ("latency", "host_latency", "size", "drop")


def variant_table(variants: list[CarriedVariant]) -> Markup | None:
    """Return the heading, table and note of the further variants, or None if there are none."""
    if not variants:
        return None
    rows = [
        el(
            "tr",
            el("th", variant["name"], scope="row"),
            el("td", f"{variant['backend']}: {variant['label']}"),
            *(
                figure_cell(
                    variant["figures"][name],
                    FIGURES[name][1],
                    labelled=True,
                    interval=variant["drop"] if name == "drop" else None,
                )
                for name in _FIGURE_NAMES
            ),
        )
        for variant in variants
    ]
    head = ("Variant", "Its candidate", *(FIGURES[name][0] for name in _FIGURE_NAMES))
    caption = "Further variants in the package"
    numeric = frozenset(range(2, 2 + len(_FIGURE_NAMES)))
    note = "Each keeps every limit; its size is that of a package with nothing else."
    return join(
        el("h3", caption),
        table(head, rows, numeric=numeric, caption=caption, style="engines"),
        el("p", note, class_="note"),
    )


def describe_variant(variant: CarriedVariant) -> str:
    latency, size = (
        f"{name} not measured" if figure["value"] is None else show(figure["value"], FIGURES[name][1])
        for name, figure in ((name, variant["figures"][name]) for name in ("latency", "size"))
    )
    drop = show_drop(variant["figures"]["drop"]["value"], variant["drop"])
    return f"{latency}, {size} alone, drop {drop}: {variant['label']}"
