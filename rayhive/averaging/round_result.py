"""Result of an averaging round, as measured in the averager's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, TypedDict


class PhaseRecord(TypedDict):
    """Measurements of one all-reduce of a round by one peer.

    Attributes:
        name: ``dense``, or PowerSGD's ``P`` or ``Q``.
        seconds: Time from its start to this peer's last averaged part.
        sent_bytes: Payload of parts sent to reducers and of replies made as a reducer.
        received_bytes: Payload of parts received as a reducer and of replies.
        fraction: Share of the averaging that happened, see ``RoundResult.fraction``.
    """

    name: str
    seconds: float
    sent_bytes: int
    received_bytes: int
    fraction: float


@dataclass(eq=False, repr=False)
class RoundResult(dict[Any, Any]):
    """Outcome of a round: the gathered data by peer id, and the measurements.

    hivemind's optimizer reads only the dictionary.

    Attributes:
        group_size: Number of peers of the group.
        phases: Its all-reduces, in order.
        sent_bytes: Payload that this peer sent in the round, buffers only.
        received_bytes: Payload that it received.
        wasted_bytes: Payload sent in attempts that failed since the last result.
        fraction: Fraction of the averaging that happened, the minimum over the phases and over
            both sides: parts of this peer that came back averaged, and parts of other peers that
            entered the averages of this reducer. Averages that an attempt left before it failed are
            sent again, and do not count. 1.0 is a complete round as far as this peer knows.
        banned: Senders that this peer gave up as a reducer.
        failures: Reasons why its own parts did not come back averaged, by reducer.
        matchmaking_s: Wait for the group [s], from the trigger or from the start of the step if
            that came later.
        allreduce_s: Time from the group to this peer's last averaged part [s].
        attempts: Searches for a group since the last result; 1 if nothing failed.
        counts_complete: Whether every reply had left when the bytes were read, so that they are
            exact.
        rejected: Refusals, see :mod:`rayhive.averaging.round_filter`: ``offender``, ``reason``,
            ``norm``, ``bound`` and ``lean``.
        excluded: Whether this peer's own tensors were refused and did not enter the average.
    """

    gathered: InitVar[Mapping[Any, Any] | None] = None
    phases: tuple[PhaseRecord, ...] = ()
    wasted_bytes: int = 0
    banned: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    matchmaking_s: float = 0.0
    allreduce_s: float = 0.0
    attempts: int = 1
    counts_complete: bool = True
    rejected: tuple[dict[str, Any], ...] = ()
    excluded: bool = False

    def __post_init__(self, gathered: Mapping[Any, Any] | None) -> None:
        self.update(gathered or {})
        self.group_size = len(self)
        self.sent_bytes = sum(phase["sent_bytes"] for phase in self.phases)
        self.received_bytes = sum(phase["received_bytes"] for phase in self.phases)
        self.fraction = min((phase["fraction"] for phase in self.phases), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Return the measurements without the members."""
        lists = ("phases", "banned", "failures", "rejected")
        return {k: list(v) if k in lists else v for k, v in vars(self).items()}


def round_fields(result: Mapping[Any, Any], seconds: float) -> dict[str, Any]:
    """Return the fields of a ``round`` or ``state_round`` event that come from a result.

    Args:
        result: Gathered data by peer id; only a :class:`RoundResult` has measurements, and not
            that of a user's own averager.
        seconds: Wait for the result [s].
    """
    if isinstance(result, RoundResult):
        fields = result.summary()
    else:
        unmeasured = RoundResult(dict(result), allreduce_s=seconds).summary()
        fields = {**unmeasured, "fraction": 1.0, "matchmaking_s": None}
    del fields["rejected"]
    fields["retries"] = max(0, fields.pop("attempts") - 1)
    fields["averaging_s"] = fields.pop("allreduce_s")
    return {**fields, "group": sorted(map(str, result)), "waited_s": seconds}
