"""Work for the results of a long replicate: executed instructions are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rayhive
from rayhive.events import make_event
from rayhive.invariants import check_all
from rayhive.metrics.fault_impact import impacts
from rayhive.metrics.rows import timeline_row
from rayhive.timeline import Timeline
from tests.fixtures.logs import START, Line, Log, make_spec, timeline_of

#: Rounds from one fault to the next.
EVERY = 6
#: Work for twice as many rounds, as a multiple; work that grows with the square is 4 times as much.
TWICE = 2.2
PACKAGE = str(Path(rayhive.__file__).parent)


def chaos(rounds: int) -> Timeline:
    """Timeline of a replicate with two peers, an evaluation and a pause every few rounds."""
    checks = rounds // 2
    log = Log(
        spec=make_spec(),
        seconds=(1.0,) * rounds,
        losses=tuple(1.0 / (n + 1) for n in range(checks)),
        accuracies=(0.5,) * checks,
    )
    events = log.events()
    for number, kind in enumerate(range(0, rounds, EVERY)):
        # events of a peer are 10 ms apart, and a round has more than four of them
        at = START + 5.2 + 0.045 * kind
        fault, peer = f"pause-{number}", f"peer-{number % 2}"
        events[1:1] = [
            stored("fault_fired", at, fault=fault, fault_kind="pause", effect="stopped",
                   lives=[peer], targets=[peer]),
            stored("fault_verified", at, fault=fault, ok=True),
            stored("fault_healed", at + 0.02, fault=fault),
        ]  # fmt: skip
    return timeline_of(log.spec, events)


def stored(kind: str, at: float, **fields: Any) -> Line:
    return {**dict(make_event(kind, **fields)), "t": at}


def instructions(call: Callable[[], object]) -> int:
    """Return the number of bytecodes of rayhive that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


WORK: dict[str, Callable[[Timeline], object]] = {
    "row": timeline_row,
    "fault impact": impacts,
    "invariants": lambda log: check_all(log.spec, log.events),
    "committed samples": lambda log: [log.committed(number) for number in log.rounds],
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_with_the_length_of_the_log(name: str) -> None:
    WORK[name](chaos(8))  # what is done once
    counts = [instructions(partial(WORK[name], chaos(rounds))) for rounds in (60, 120)]
    assert counts[0] > 1000
    assert counts[1] < TWICE * counts[0]


def test_the_work_includes_faults_and_recoveries() -> None:
    found = impacts(chaos(120))
    assert len(found) == 120 // EVERY
    assert any(fault.recover_s is not None for fault in found)
