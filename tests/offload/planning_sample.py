"""A made-up result of planning, for tests that show it: seven candidates, three round trips, all sections."""

from dataclasses import replace

from edgekit_offload.planning.result import (
    Candidate,
    Certificate,
    Kind,
    PlannedMachine,
    PlanningResult,
    Refusal,
    SentTensor,
    TierPlan,
    WinRange,
)
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan, PlanCosts

BANDWIDTHS = tuple(round(100 ** (index / 20), 3) for index in range(21))
RTTS = (5.0, 20.0, 100.0)
HOSTILE = "</script><script>alert('1')</script><b>\"\u202e\x1b[31m&amp; ünïcode 模型"


def _plans() -> list[tuple[Kind, OffloadPlan]]:
    def costs(device_s: float, server_s: float = 0.0, upload: float = 0.0) -> PlanCosts:
        return PlanCosts(device_s, server_s, upload, 4000.0 if upload else 0.0, is_measured=True)

    return [
        ("local", OffloadPlan("local", costs(0.1))),
        ("upload", OffloadPlan("raw", costs(0.0, 0.02, 602_112), tail="whole")),
        ("upload", OffloadPlan("uint8", costs(0.001, 0.02, 150_528), tail="whole")),
        (
            "upload",
            OffloadPlan(
                "jpeg:90",
                costs(0.004, 0.021, 21_000),
                tail="whole",
                media={"image": "jpeg:90"},
                answers_changed=0.0015,
            ),
        ),
        (
            "cut",
            OffloadPlan(
                "cut3-int8",
                costs(0.04, 0.012, 2_000),
                head="c.head",
                tail="c.tail",
                answers_changed=0.0,
                leakage_db=20.5,
            ),
        ),
        ("cut", OffloadPlan("cut5-int4", costs(0.07, 0.004, 800), head="d.head", tail="d.tail")),
        (
            "cascade",
            OffloadPlan(
                "cascade",
                costs(0.03, 0.02, 21_000),
                head="e.head",
                tail="whole",
                escalation=Escalation("logits", 0.4, 0.9),
            ),
        ),
    ]


def _wins(latency: list[list[list[float]]], index: int) -> tuple[WinRange, ...]:
    found: list[WinRange] = []
    for row, rtt_ms in enumerate(RTTS):
        for column, mbit_s in enumerate(BANDWIDTHS):
            if min(range(len(latency)), key=lambda other: latency[other][row][column]) != index:
                continue
            last = found[-1] if found else None
            if column and last and last.rtt_ms == rtt_ms and last.to_mbit_s == BANDWIDTHS[column - 1]:
                found[-1] = replace(last, to_mbit_s=mbit_s)
            else:
                found.append(WinRange(rtt_ms, mbit_s, mbit_s))
    return tuple(found)


def sample() -> PlanningResult:
    """Return a result with every section of the page."""
    plans = _plans()
    latency = [
        [
            [1e3 * predict_s(plan, Conditions(LinkState(b * 1e6, b * 1e6, rtt / 1e3))) for b in BANDWIDTHS]
            for rtt in RTTS
        ]
        for _, plan in plans
    ]
    certificate = Certificate(
        proof="enumerated", cost=0.08, bound=0.08, gap=0.0, placements=4120, bandwidth_mbit_s=12.0, rtt_ms=5.0
    )
    candidates = []
    for index, (kind, plan) in enumerate(plans):
        rows, wins = tuple(map(tuple, latency[index])), _wins(latency, index)
        coding = plan.name.partition("-")[2] or plan.name
        candidates.append(
            Candidate(
                kind=kind,
                plan=plan,
                label="emulated" if index != 5 else "modelled",
                sent=(
                    SentTensor(
                        name="relu_3", coding=coding, raw_bytes=602_112.0, sent_bytes=plan.costs.upload_bytes
                    ),
                )
                if plan.tail
                else (),
                latency_ms=rows,
                score=rows,
                wins=wins,
                in_table=bool(wins),
                kernels_on_device=11 if kind == "cut" else 0,
                certificate=replace(certificate, coding=coding) if kind == "cut" else None,
                sends_input=kind in ("upload", "cascade"),
                known_inputs=0 if plan.leakage_db is None else 800,
            )
        )
    tier = TierPlan(
        bandwidths_mbit_s=(20.0, 100.0),
        rtts_ms=(5.0, 30.0),
        kernels=(4, 10, 13),
        sent=((SentTensor(name="a", coding="int8", raw_bytes=100.0, sent_bytes=60.0),), ()),
        compute_ms=(10.0, 20.0, 5.0),
        total_ms=55.0,
        certificate=Certificate(
            proof="dual", cost=0.055, bound=0.0549, gap=0.001, placements=0, bandwidth_mbit_s=20.0, rtt_ms=5.0
        ),
    )
    return PlanningResult(
        model="sample.onnx",
        model_sha256="ab" * 32,
        objective="latency",
        unit="ms",
        device=PlannedMachine(name="this machine at 20 % of a core", label="emulated"),
        server=PlannedMachine(name="this machine", label="measured"),
        bandwidths_mbit_s=BANDWIDTHS,
        rtts_ms=RTTS,
        candidates=tuple(candidates),
        table=CutTable(tuple(candidate.plan for candidate in candidates)),
        refusals=(Refusal("opus", "the input is no audio"),),
        warnings=("The profile is 9 days old.",),
        sentences=("Offloading pays above 6 Mbit/s.",),
        kernels=27,
        samples=64,
        tiers=(tier,),
    )


def hostile() -> PlanningResult:
    """Return a result in which every foreign text is an attack."""
    plain = sample()
    candidates = tuple(
        replace(
            candidate,
            plan=replace(
                candidate.plan, name=candidate.name if candidate.name == "local" else f"{HOSTILE}{number}"
            ),
            sent=tuple(replace(tensor, name=HOSTILE, coding=HOSTILE) for tensor in candidate.sent),
            explanation=HOSTILE,
        )
        for number, candidate in enumerate(plain.candidates)
    )
    return replace(
        plain,
        model=HOSTILE,
        model_sha256=HOSTILE,
        unit=HOSTILE,
        device=PlannedMachine(name=HOSTILE, label="measured"),
        server=PlannedMachine(name=HOSTILE, label="measured"),
        candidates=candidates,
        refusals=(Refusal(HOSTILE, HOSTILE),),
        warnings=(HOSTILE,),
        sentences=(HOSTILE,),
    )


def without_candidates() -> PlanningResult:
    """Return a result of a model for which nothing could be measured."""
    return replace(sample(), candidates=(), refusals=(), warnings=(), sentences=(), kernels=0, tiers=())


def only_local() -> PlanningResult:
    """Return a result with one candidate, at one bandwidth and one round trip."""
    plain = sample()
    candidate = replace(
        plain.candidates[0], latency_ms=((100.0,),), score=((100.0,),), wins=(WinRange(20.0, 5.0, 5.0),)
    )
    return replace(plain, candidates=(candidate,), bandwidths_mbit_s=(5.0,), rtts_ms=(20.0,), tiers=())
