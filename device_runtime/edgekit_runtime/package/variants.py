"""A variant: one way to run the model of a package, with its golden outputs and figures.

All variants of a package have the same inputs and outputs, and all have met the budget, so they are
interchangeable. The module `sessions` chooses the variant to run.

Source: docs/reference/package-format.md, section "Variants".
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from edgekit_runtime.canonical_json import JsonValue, Record
from edgekit_runtime.package.golden import Golden
from edgekit_runtime.package.manifest_entries import (
    BackendChoice,
    require,
    require_object,
    require_token,
)
from edgekit_runtime.records import dataclass

DEFAULT_VARIANT: Final = "default"
MAX_VARIANTS: Final = 8  # beside the default, so that a tournament or all self-tests end soon


@dataclass(frozen=True, slots=True)
class Variant(Record):
    """One way to run the model of a package.

    Attributes:
        name: The name of the variant. `DEFAULT_VARIANT` is reserved for the variant at the manifest's top
            level.
        golden: The inputs and the outputs that this variant must reproduce.
        figures: Measured figures of the variant that do not vary from run to run.
    """

    name: str
    backend: BackendChoice
    golden: Golden
    figures: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require_token(self.name, "variant name")
        require_object(self.figures, f"variant '{self.name}': figures")


def check_variants(variants: tuple[Variant, ...]) -> None:
    """Check that these variants may be in one package, in addition to the default variant.

    Raises:
        ManifestError: There are too many variants, or a name is repeated or is `DEFAULT_VARIANT`.
    """
    require(
        len(variants) <= MAX_VARIANTS,
        f"variants holds {len(variants)}, expected at most {MAX_VARIANTS}",
    )
    names = [DEFAULT_VARIANT, *(variant.name for variant in variants)]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(
        not twice,
        f"variants: the name {', '.join(twice)} stands twice ('{DEFAULT_VARIANT}' is that of the top level)",
    )
