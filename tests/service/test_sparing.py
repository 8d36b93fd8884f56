"""Which log records are written, and how."""

import logging

from edgekit_runtime.service.sparing import SparingTracebacks


class Log:
    """A logger whose lines are kept, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s, self.lines = 100.0, list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        handler.addFilter(SparingTracebacks(lambda: self.now_s))
        self.logger = logging.Logger("test")
        self.logger.addHandler(handler)

    def fail(self, model: str, kind: type[Exception] = ValueError) -> None:
        try:
            raise kind  # noqa: TRY301  # to have a traceback
        except kind:
            self.logger.exception("the outputs of %s are wrong", model)


def test_fault_of_each_request_is_said_once_a_minute_with_a_count() -> None:
    log = Log()
    for _ in range(1000):
        log.fail("kws")
    assert log.lines == ["the outputs of kws are wrong"]
    log.now_s += 60
    for _ in range(5):
        log.fail("kws")
    assert log.lines[1:] == ["the outputs of kws are wrong (999 times more since it was last said)"]


def test_faults_of_other_models_and_other_reasons_are_said_each() -> None:
    log = Log()
    for model in ("a", "b"):
        for kind in (ValueError, TypeError, ValueError):
            log.fail(model, kind)
    assert len(log.lines) == 4


def test_faults_with_names_that_clients_make_up_do_not_flood_the_log() -> None:
    log = Log()
    for number in range(10_000):
        log.fail(f"made-up-{number}")
    assert len(log.lines) < 100
    log.now_s += 61
    log.fail("one more")
    assert log.lines[-1].startswith("the outputs of one more")


def test_records_without_a_traceback_are_all_written() -> None:
    log = Log()
    for _ in range(3):
        log.logger.error("its worker is lost")
    assert len(log.lines) == 3
