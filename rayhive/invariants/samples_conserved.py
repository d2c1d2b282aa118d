"""No sample is counted twice, and none vanishes unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from rayhive.events import Event
from rayhive.invariants.base import Invariant, RunLog
from rayhive.spec.replicate import ReplicateSpec


class SamplesConserved(Invariant):
    """Of every peer: computed = entered into rounds + thrown away + pending.

    Checked where a peer tells ``computed``, its own count of what went through a backward pass: at
    each ``transition``, and when it ends (``samples`` and ``pending`` of ``peer_finished``). What
    entered rounds is ``samples`` of its ``round`` events, what it threw away is ``lost`` of its
    ``round``, ``state_loaded`` and ``left`` events. Nothing is pending right after a transition. A
    round that has not yet been told (with delayed gradients it comes later) leaves its transition
    out.

    Losses have to be possible: none is negative, and a round which samples of a peer entered took
    no others from it. Where a peer does not tell what was pending, all that can be said of its end
    is that no more entered its rounds than it had computed.
    """

    about = "Computed samples = committed + lost + pending, of every peer."

    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return where samples were made up or vanished."""
        if spec.swarm.use_local_updates:
            return []  # there are no rounds that samples enter
        log = RunLog(spec, events)
        return [text for name in log.trained for text in self._of_life(log, name)]

    def _of_life(self, log: RunLog, name: str) -> Iterator[str]:
        entered = {event["round"]: _gone_into(event) for event in log.of(name, "round")}
        rounds = sorted(entered)
        so_far = dict(zip(rounds, accumulate(entered[n] for n in rounds), strict=True))
        thrown = 0
        for event in log.peers[name]:
            kind, lost = event["kind"], event.get("lost") or 0
            if lost < 0 or (kind == "round" and lost and event["samples"]):
                yield f"{name}, {kind} {event['round']}: {lost} lost, {event.get('samples', 0)} not"
            if kind in ("state_loaded", "left"):
                thrown += lost
            elif kind == "transition" and "computed" in event and event["round"] in entered:
                known = so_far[event["round"]] + thrown
                yield from self._equal(name, f"round {event['round']}", event["computed"], known)
            elif kind == "peer_finished":
                done = sum(entered.values()) + thrown
                if "pending" in event:
                    yield from self._equal(name, "end", event["samples"], done + event["pending"])
                else:
                    self.checked += 1
                    if done > event["samples"]:
                        yield f"{name}: {done} samples in rounds, {event['samples']} computed"

    def _equal(self, name: str, where: str, computed: int, known: int) -> Iterator[str]:
        self.checked += 1
        if computed != known:
            yield f"{name}, {where}: computed {computed}, committed + lost + pending {known}"


def _gone_into(event: Event) -> int:
    """Return the samples that a round took from its peer, to whatever use."""
    return int(event["samples"]) + int(event.get("lost") or 0)
