"""What the search for candidates has found: forms that stand for choice, and what became of the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.sensitivity import BlockNoise, Fidelity, decibel


@dataclass(frozen=True, slots=True)
class Candidate:
    """One form of the model.

    Attributes:
        label: what it is, for people.
        form: how to build it again.
        model: the form's model.
        snr_db: output signal to noise on calibration samples, against the float model.
    """

    label: str
    form: Form
    model: Model
    snr_db: float


@dataclass(slots=True)
class Found:
    """What the search has found so far.

    Attributes:
        candidates: the float model first.
        noises: noise of single blocks, as far as they were measured.
        noise_samples: calibration samples on which output noise was measured; 0 where it was not.
        dropped: forms that could not be built or run, with the reason.
        set_aside: forms that were built and that a near relative beats, with by how much; without data also
            those that differ from the float model on generated inputs.
    """

    candidates: list[Candidate] = field(default_factory=list)
    noises: list[BlockNoise] = field(default_factory=list)
    noise_samples: int = 0
    dropped: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)

    def add(
        self, label: str, quantizer: Quantizer[Any], form: Form, fidelity: Fidelity[Any]
    ) -> Candidate | None:
        """Build a form and add it, unless it changes nothing; one that fails or cannot run is dropped."""
        try:
            built = quantizer.build(form)
            if built is None:
                return None
            snr_db = decibel(fidelity.noise(built))
            candidate = Candidate(label, form, quantizer.as_model(built), snr_db)
        except EdgekitError as error:
            self.dropped.append(f"{label}: {str(error).splitlines()[0]}")
            return None
        self.candidates.append(candidate)
        return candidate

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Take candidates off the list for good, by place, because of what judging found.

        Raises:
            ModelError: the float model is among them, so that no form of it can be right.
        """
        if 0 in reasons:
            raise ModelError(
                f"{self.candidates[0].label}, before any quantization: {reasons[0]}; check the samples, or"
                " take another engine (--backend)"
            )
        self.dropped += [f"{self.candidates[place].label}: {reason}" for place, reason in reasons.items()]
        self.candidates = [one for place, one in enumerate(self.candidates) if place not in reasons]

    def set_apart(self, reasons: Mapping[int, str]) -> None:
        """Take candidates off the list, by place, and say why in `set_aside`."""
        self.set_aside += [f"{self.candidates[place].label} ({reason})" for place, reason in reasons.items()]
        self.candidates = [one for place, one in enumerate(self.candidates) if place not in reasons]

    def put_aside(self, candidate: Candidate, better: Candidate) -> None:
        """Take a candidate off the list, because `better` has less noise at the same place."""
        self.candidates.remove(candidate)
        loss_db = better.snr_db - candidate.snr_db
        self.set_aside.append(f"{candidate.label} ({loss_db:.1f} dB more noise than {better.label})")
