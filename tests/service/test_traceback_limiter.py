"""Which log records are written, and how."""

import logging
import sys
import threading

from edgekit_runtime.service.observability.traceback_limiter import TracebackLimiter


class Log:
    """A logger whose lines are kept, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s, self.lines = 100.0, list[str]()
        self.logger = logging.Logger("test")
        self.add_handler(self.lines)

    def add_handler(self, lines: list[str]) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        handler.addFilter(TracebackLimiter(handler, lambda: self.now_s))
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


def test_two_handlers_say_the_same_and_count_for_themselves() -> None:
    log, others = Log(), list[str]()
    log.add_handler(others)
    for _ in range(3):
        log.fail("kws")
        log.now_s += 50
    log.fail("kws")
    assert others == log.lines
    assert len(others) == 2


def test_threads_lose_no_fault() -> None:
    log, interval_s = Log(), sys.getswitchinterval()

    def fail(number: int) -> None:
        for count in range(4000):
            log.fail(f"{number}-{count % 300}")  # more than are kept apart
            log.now_s += 0.9  # so that some are forgotten each time

    threads = [threading.Thread(target=fail, args=(number,)) for number in range(4)]
    failures: list[object] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval_s)
        threading.excepthook = hook
    assert failures == []
