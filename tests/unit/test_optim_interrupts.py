"""Ctrl-C is held back while locks may be held."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rayhive.optim.interrupts import DeferredInterrupts


@pytest.fixture(autouse=True)
def pythons_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_at_the_end_of_the_body() -> None:
    calls: list[str] = []
    deferred = DeferredInterrupts(lambda: calls.append("wake"), lambda: calls.append("end"))
    with pytest.raises(KeyboardInterrupt), deferred:
        signal.raise_signal(signal.SIGINT)
        calls.append("body")
    assert calls == ["wake", "body", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with deferred:  # it was raised once
        pass


def test_an_inner_body_does_not_raise() -> None:
    deferred, reached = DeferredInterrupts(), []
    with pytest.raises(KeyboardInterrupt), deferred:
        with deferred:
            signal.raise_signal(signal.SIGINT)
        reached.append(True)
    assert reached


def test_an_error_that_the_interrupt_caused_is_replaced_by_it() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():
        signal.raise_signal(signal.SIGINT)
        raise TimeoutError


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_is_raised_in_a_part_that_allows_it(before: bool) -> None:
    deferred, reached = DeferredInterrupts(), []
    with pytest.raises(KeyboardInterrupt), deferred:
        if before:
            signal.raise_signal(signal.SIGINT)
        with deferred.allowed():
            reached.append("allowed")
            signal.raise_signal(signal.SIGINT)
            reached.append("too late")
    assert reached == ([] if before else ["allowed"])
    with deferred:
        pass


def test_other_handlers_run_at_once() -> None:
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    with DeferredInterrupts():
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]


def test_other_threads_change_no_handler() -> None:
    deferred, errors = DeferredInterrupts(), []

    def work() -> None:
        try:
            with deferred, deferred.allowed():
                pass
        except BaseException as error:
            errors.append(error)

    with deferred:
        handler: Any = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) == handler
    assert errors == []
