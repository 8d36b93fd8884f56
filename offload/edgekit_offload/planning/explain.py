"""Writes sentences about the result of planning, for single candidates and for the whole plan."""

import math
from collections.abc import Sequence
from typing import Final

from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.result import Candidate, Certificate, PlannedMachine, StatedLimit, WinRange
from edgekit_runtime.offload.offload_plan import LOCAL

_WORTH: Final = 1.02  # a smaller gain is not worth a sentence
LIMIT_BROKEN: Final = 1e6  # larger than the gain of any real scores
_NAMED: Final = 3  # number of tensors that a sentence names
_PROOFS: Final = {
    "enumerated": "all {} placements tried",
    "dual": "a checked solution of the dual program",
    "solver": "the bound of the search",
}


def explain_candidate(candidate: Candidate, kernels: int, *, is_reserve: bool = False) -> str:
    """Return a sentence that says what a candidate does, what it sends, and when it is the best.

    Args:
        candidate: A candidate without `explanation`.
        kernels: The number of kernels in the model.
        is_reserve: Whether the candidate is in the table only as a fallback, for inputs with values that the
            best candidates cannot encode.
    """
    costs = candidate.plan.costs
    if candidate.kind == "local":
        text = f"Runs everything on the device in {_ms(costs.device_s)}"
    else:
        names = [
            f"'{tensor.name}' as {tensor.coding}{tensor.rounding and f' ({tensor.rounding})'}"
            for tensor in candidate.sent[:_NAMED]
        ]
        names += [f"{len(candidate.sent) - _NAMED} more"] * (len(candidate.sent) > _NAMED)
        where = {
            "upload": "Sends the input",
            "cut": f"Runs {candidate.kernels_on_device} of {kernels} kernels on the device and sends",
            "cascade": "Runs a small model on the device, and where it is unsure sends the input",
        }[candidate.kind]
        text = f"{where} {', '.join(names)} ({size(costs.upload_bytes)})"
    if candidate.is_over_loss:
        return f"{text}; {_describe_loss(candidate)}."
    if is_reserve:
        return f"{text}; for inputs beyond the values of the samples, which the best candidates cannot carry."
    if candidate.wins:
        return f"{text}; best at {describe_ranges(candidate.wins)}."
    return f"{text}; best under load only." if candidate.in_table else f"{text}; never the best."


def explain_plan(
    candidates: Sequence[Candidate], bandwidths: Sequence[float], rtts: Sequence[float], unit: str
) -> tuple[str, ...]:
    """Return sentences that say under which conditions offloading is better than running locally.

    The candidates have a score for each pair of `bandwidths` (Mbit/s) and `rtts` (round-trip times in ms).
    `unit` is the unit of the scores.
    """
    sentences = []
    too_lossy = [candidate for candidate in candidates if candidate.is_over_loss]
    candidates = [candidate for candidate in candidates if not candidate.is_over_loss]
    local = next((candidate for candidate in candidates if candidate.name == LOCAL), None)
    remote = [candidate for candidate in candidates if candidate.kind != "local" and candidate.wins]
    if local is None:
        sentences.append("The device cannot run the whole model within its limits, so a server is needed.")
    elif not remote:
        sentences.append("Offloading does not pay at any setting of this link: run the model on the device.")
    for candidate in remote:
        rivals = [other for other in candidates if other is not candidate and _is_rival(candidate, other)]
        if not rivals:
            continue
        gain, rtt, bandwidth, rival = max(
            (
                (
                    min(other.score[row][column] for other in rivals)
                    / max(candidate.score[row][column], 1e-12),
                    rtts[row],
                    bandwidths[column],
                    min(rivals, key=lambda other: other.score[row][column]).name,
                )
                for win in candidate.wins
                for row in [list(rtts).index(win.rtt_ms)]
                for column in range(len(bandwidths))
                if win.from_mbit_s <= bandwidths[column] <= win.to_mbit_s
            ),
            key=lambda gain: gain[0],
        )
        if gain >= LIMIT_BROKEN:
            where = f"{bandwidth:g} Mbit/s and {rtt:g} ms"
            sentences.append(
                f"'{candidate.name}' pays at {describe_ranges(candidate.wins)}: '{rival}' breaks the limit"
                f" at {where}."
            )
        elif gain >= _WORTH:
            sentences.append(
                f"'{candidate.name}' pays at {describe_ranges(candidate.wins)}: up to {gain:.3g} times better"
                f" than '{rival}' (at {bandwidth:g} Mbit/s and {rtt:g} ms, in {unit})."
            )
    cuts = [candidate for candidate in candidates if candidate.kind == "cut"]
    if cuts and not any(candidate.wins for candidate in cuts):
        sentences.append(_why_no_cut(cuts, candidates, bandwidths))
    sentences += [_what_loss_gains(candidate, candidates, bandwidths) for candidate in too_lossy]
    return tuple(filter(None, sentences))


def explain_leakage(
    limit_db: float, attacked: int, refused: int, least: Leakage | None, *, is_ended: bool
) -> str:
    """Return a text about the search for cuts within a limit on leakage.

    Args:
        limit_db: The limit in dB.
        attacked: The number of cuts that were checked.
        refused: The number of cuts that exceed the limit.
        least: The lowest leakage of the refused cuts, or None if it is unknown.
        is_ended: Whether all cuts that might keep the limit were tried.
    """
    if not attacked:
        return f"No cut was found to hold against --max-leak {limit_db:g} dB."
    end = "" if is_ended else " The search ended before the last cut: a deeper one may leak less."
    accepted, cuts = attacked - refused, "1 cut was" if attacked == 1 else f"{attacked} cuts were"
    if accepted:
        verb = "keeps" if accepted == 1 else "keep"
        return f"{cuts} attacked: {accepted} {verb} --max-leak {limit_db:g} dB, {refused} refused.{end}"
    which = "" if least is None else f", and the least that one of them leaks is {least.describe()}"
    return f"No cut keeps --max-leak {limit_db:g} dB: {cuts} attacked and refused{which}.{end}"


def describe_ranges(wins: Sequence[WinRange]) -> str:
    """Return ranges of bandwidth as text, such as `2 to 10 Mbit/s (RTT 20 ms)`."""
    parts = []
    for win in wins:
        low, high = f"{win.from_mbit_s:.3g}", f"{win.to_mbit_s:.3g}"
        parts.append(f"{low if low == high else f'{low} to {high}'} Mbit/s (RTT {win.rtt_ms:g} ms)")
    return ", ".join(parts)


def describe_certificate(certificate: Certificate) -> str:
    """Return a text about the proof of a cut, with the coding, link, loads and limits to which it applies."""
    how = _PROOFS.get(certificate.proof, certificate.proof).format(f"{certificate.placements:,}")
    rivals = "split" if certificate.splits_only else "placement"
    if certificate.gap <= 0:
        claim = f"no {rivals} costs less"
    else:
        claim = f"no {rivals} costs {100 * certificate.gap:.2g} % less"
    loads = [
        f"with the {machine} {slowdown:.3g} times slower"
        for machine, slowdown in (
            ("device", certificate.device_slowdown),
            ("server", certificate.server_slowdown),
        )
        if slowdown != 1
    ]
    coding = f"with {certificate.coding} tensors"
    link = f"at {certificate.bandwidth_mbit_s:.3g} Mbit/s and {certificate.rtt_ms:.3g} ms"
    limits = [_describe_limit(limit) for limit in certificate.limits]
    residents = [f"with {_name_few(certificate.pinned)} kept on the device"] if certificate.pinned else []
    pins = ["cuts that leak too much left out"] if certificate.has_pins else []
    where = ", ".join((coding, link, *loads, *limits, *residents, *pins))
    return f"{how}: {claim} in the model of costs, {where}"


def describe_answers(candidate: Candidate, samples: int) -> str:
    """Return a text about the answers that a candidate changes, and those that probably become wrong.

    `samples` is the number of samples on which this was measured.
    """
    share, parts = candidate.plan.answers_changed, []
    if share is not None:
        parts.append(f"{100 * share:.2g} % changed" if share else "none changed")
    if candidate.expected_loss:
        error = f" ± {100 * candidate.loss_error:.2g}" if candidate.loss_error else ""
        cause = " by its upload" if candidate.kind == "cascade" else ""
        parts.append(f"{100 * candidate.expected_loss:.2g}{error} % wrong{cause} (estimated)")
    return f"{', '.join(parts)}, of {samples}" if parts else "not known"


def describe_leakage(candidate: Candidate) -> str:
    """Return a text about how well an attacker can reconstruct the input from the data that is sent."""
    if candidate.sends_input:
        return "the input itself"
    leakage_db = candidate.plan.leakage_db
    if leakage_db is None:
        return "not measured"
    return f"≥ {leakage_db:.0f} dB" + (
        f" from {candidate.known_inputs:,} known inputs" * (candidate.known_inputs > 0)
    )


def describe_limits(machine: PlannedMachine) -> str:
    """Return the limits of a machine, such as `8 MB of weights`, or an empty text."""
    limits = ((machine.weights_bytes, "weights"), (machine.memory_bytes, "weights and activations"))
    return ", ".join(f"{size(limit)} of {quantity}" for limit, quantity in limits if limit is not None)


def size(count: float) -> str:
    """Return a number of bytes as text in B, kB (1000 bytes) or MB, such as `1.5 MB`."""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _describe_limit(limit: StatedLimit) -> str:
    """Return a limit of a certificate, such as `with latency within 150 ms`."""
    name = limit.name
    at_most = f"{limit.at_most * 1e3:.6g} ms" if limit.unit == "s" else size(limit.at_most)
    if limit.server_waits:
        name += f" and a wait of {limit.server_waits:g} times the server's time"
    return f"with {name} within {at_most}"


def _name_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = [f"{len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return ", ".join([*(f"'{name}'" for name in names[:_NAMED]), *more])


def _is_rival(candidate: Candidate, other: Candidate) -> bool:
    """Whether `other` is an alternative to `candidate`: a cut competes with whole-model candidates."""
    return (
        other.kind in ("local", "upload") if candidate.kind in ("cut", "cascade") else other.kind == "local"
    )


def _why_no_cut(
    cuts: Sequence[Candidate], candidates: Sequence[Candidate], bandwidths: Sequence[float]
) -> str:
    """Return why splitting does not pay: the cut that comes nearest, and what beats it there."""
    ratio, name, rival, column = min(
        (
            candidate.score[row][column] / max(best.score[row][column], 1e-12),
            candidate.name,
            best.name,
            column,
        )
        for candidate in cuts
        for row in range(len(candidate.score))
        for column in range(len(candidate.score[row]))
        for best in [
            min(candidates, key=lambda other: other.score[row][column] if other.kind != "cut" else 1e300)
        ]
    )
    if ratio <= 1:
        return f"No cut pays: '{name}' is within 1 % of the simpler '{rival}' at best."
    return (
        f"No cut pays: the one that comes nearest, '{name}', is {ratio:.3g} times worse than '{rival}' at"
        f" {bandwidths[column]:.3g} Mbit/s."
    )


def _what_loss_gains(
    candidate: Candidate, candidates: Sequence[Candidate], bandwidths: Sequence[float]
) -> str:
    """Return the gain of a candidate that loses too much accuracy over the others; empty if none."""
    gain, rival, column = max(
        (best.score[row][column] / max(candidate.score[row][column], 1e-12), best.name, column)
        for row in range(len(candidate.score))
        for column in range(len(candidate.score[row]))
        for best in [min(candidates, key=lambda other: other.score[row][column])]
    )
    if gain < _WORTH:
        return ""
    comparison = f"up to {gain:.3g} times better than" if gain < LIMIT_BROKEN else "within the limit, unlike"
    where = f"at {bandwidths[column]:.3g} Mbit/s"
    return f"'{candidate.name}' would be {comparison} '{rival}' ({where}): {_describe_loss(candidate)}."


def _describe_loss(candidate: Candidate) -> str:
    if candidate.samples_needed:
        return (
            f"not offered, since it takes at least {candidate.samples_needed} samples to estimate what its"
            " coding changes: give them by --samples; --max-loss 100% admits it without"
        )
    if candidate.expected_loss is None:
        return (
            "not offered, since what its coding changes is unknown: name the output with scores of classes by"
            " --classes; --max-loss 100% admits it without"
        )
    loss, error = 100 * candidate.expected_loss, 100 * candidate.loss_error
    enough = math.ceil((loss + error) * 100) / 100
    return (
        f"not offered, since its coding is expected to make {loss:.2g} ± {error:.2g} % of the answers wrong;"
        f" --max-loss {enough:g}% admits it"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
