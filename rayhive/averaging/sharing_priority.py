"""The round of the state that an averager shares, told to its process without a message a round.

hivemind sends its process a message in every round. That wakes a process at the moment when each
trainer of the machine has a round to end, and announcements are seconds apart anyway
(:func:`rayhive.averaging.state_download.declare_state`).
"""

from __future__ import annotations

from typing import Any


def _get(averager: Any) -> float:
    return float(averager._state_sharing_priority.value)


def _set(averager: Any, round_: float) -> None:
    before, averager._state_sharing_priority.value = _get(averager), round_
    if averager.allow_state_sharing and bool(before) != bool(round_):
        averager._outer_pipe.send(("_trigger_declare_load_state", [], {}))


#: Round of the shared state, 0 for that of an untrained peer: hivemind's property of an averager.
PRIORITY = property(_get, _set)


def announced(averager: Any) -> float | None:
    """Return the round to announce; None while the state is not shared."""
    return _get(averager) if averager.allow_state_sharing else None
