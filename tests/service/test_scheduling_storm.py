"""Whatever happens in whatever order, each call is answered exactly once, and never late work is run."""

import functools
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.service.scheduling_parts import Bench

from edgekit_runtime.errors import DeadlineError, EdgekitError, OverloadedError, UnavailableError
from edgekit_runtime.service.scheduling.call import Answer, Call, Run

# Rows, width, priority, patience, whether the engine refuses it, whether its answer submits another, and
# whether its inputs are made on the thread of the run.
CALLS = st.tuples(
    st.integers(1, 4),
    st.sampled_from([2, 2, 3]),
    st.integers(0, 5),
    st.none() | st.sampled_from([-1.0, 1e-4, 3e-3, 1.0]),
    st.sampled_from([False] * 4 + [True]),
    st.booleans(),
    st.booleans(),
)


def make_inputs_and_run(inputs: Any, run: Run) -> Answer:
    return EdgekitError("minus one") if (inputs["x"] == -1).any() else run(inputs)


class Storm(RuleBasedStateMachine):
    """Calls, failures, deadlines, drains and threads in any order."""

    @initialize(
        threads=st.integers(1, 3),
        instances=st.integers(1, 3),
        max_batch=st.sampled_from([1, 3, 8]),
        max_delay_s=st.sampled_from([0.0, 4e-4, 5e-3]),
        max_waiting=st.sampled_from([1, 4, 100]),
        seconds=st.sampled_from([0.0, 50e-6, 2e-3]),
        short_s=st.sampled_from([0.0, 200e-6]),
        tick_s=st.sampled_from([0.0, 1e-6, 30e-6]),
    )
    def start(self, **settings: Any) -> None:
        self.bench = Bench(is_eager=True, **settings)
        self.sent: dict[float, Call] = {}
        self.value = 0.0
        self.ended: list[bool] | None = None
        self.began: dict[float, float] = {}
        self.served: set[float] = set()
        session, run = self.bench.session, self.bench.session.run

        def noting(inputs: Any) -> Any:
            values = {float(row[-1]) for row in inputs["x"]}
            self.began.update(dict.fromkeys(values, self.bench.loop.now_s))
            outputs = run(inputs)
            self.served |= values
            return outputs

        session.run = noting  # type: ignore[method-assign]

    @rule(calls=st.lists(CALLS, min_size=1, max_size=6))
    def submit(self, calls: list[tuple[int, int, int, float | None, bool, bool, bool]]) -> None:
        for call in calls:
            self._submit(*call)

    def _submit(
        self,
        rows: int,
        width: int,
        priority: int,
        patience_s: float | None,
        is_poison: bool,
        again: bool,
        has_work: bool,
    ) -> None:
        self.value += 1
        deadline_s = None if patience_s is None else self.bench.loop.now_s + patience_s
        call = self.bench.client.call(self.value, rows, width, priority=priority, deadline_s=deadline_s)
        if is_poison:
            call.inputs["x"][0, 0] = -1
        if has_work and self.bench.lane.takes_work(call.inputs):
            call.work = functools.partial(make_inputs_and_run, call.inputs)
        if again:  # from within the answer
            reply, value = call.reply, self.value + 0.5

            def reply_and_submit(answer: Answer) -> None:
                reply(answer)
                follow = self.bench.client.call(value)
                self.sent[value] = follow
                self.bench.lane.submit(follow)

            call.reply = reply_and_submit
        self.sent[self.value] = call
        self.bench.lane.submit(call)

    @rule(seconds=st.sampled_from([0.0, 20e-6, 400e-6, 0.02]))
    def change_pace(self, seconds: float) -> None:
        self.bench.session.seconds = seconds

    @precondition(lambda self: self.bench.threads.jobs)
    @rule(pick=st.integers(0, 100))
    def end_a_job(self, pick: int) -> None:
        self.bench.threads.end(pick % len(self.bench.threads.jobs))

    @rule(seconds=st.sampled_from([0.0, 1e-4, 1e-3, 0.01]))
    def wait(self, seconds: float) -> None:
        self.bench.loop.pass_s(seconds)

    @rule(seconds=st.sampled_from([1e-3, 0.01]))
    def block(self, seconds: float) -> None:
        self.bench.loop.now_s += seconds

    @precondition(lambda self: self.ended is None and self.value > 40)
    @rule()
    def stop(self) -> None:
        self.ended = ended = []
        self.bench.lane.drain(lambda: ended.append(all(map(len, self.bench.client.answers.values()))))

    @invariant()
    def nobody_is_answered_twice_or_wrongly(self) -> None:
        for value, call in getattr(self, "sent", {}).items():
            answers = self.bench.client.answers[value]
            assert len(answers) <= 1
            if not answers:
                continue
            answer = answers[0]
            if not isinstance(answer, EdgekitError):
                assert (answer["y"] == 2 * call.inputs["x"]).all()
            elif isinstance(answer, (DeadlineError, OverloadedError, UnavailableError)):
                assert value not in self.served
            else:
                assert str(answer) == "minus one"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(1000):
            if not self.bench.threads.jobs and not self.bench.loop.is_busy and self.bench.lane.is_idle:
                break
            if self.bench.threads.jobs:
                self.bench.threads.end()
            self.bench.loop.pass_s(1e-3)
        self.nobody_is_answered_twice_or_wrongly()
        assert all(len(answers) == 1 for answers in self.bench.client.answers.values())
        assert self.ended in (None, [True])
        metrics = self.bench.metrics
        counted = metrics.succeeded + metrics.failed + metrics.shed + metrics.late + metrics.refused
        assert counted == len(self.sent)
        assert metrics.waiting == 0
        for value, call in self.sent.items():
            if call.deadline_s is not None and value in self.began:
                assert (
                    self.began[value] < call.deadline_s + 10 * self.bench.loop.tick_s
                )  # since it was looked at


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=settings().max_examples * 3 // 2,  # 150 in the long run
    stateful_step_count=50,
)
