"""Times of faults, compared with an implementation of docs/faults-metrics.md from plain events."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rayhive.events import load_event
from rayhive.metrics.fault_impact import impacts
from rayhive.spec import SwarmConfig
from rayhive.timeline import Timeline
from tests.fixtures.logs import make_spec
from tests.fixtures.storms import storm

Event = dict[str, Any]
APPLIED = ("averaged", "partial", "local", "alone")


class Oracle:
    """Definitions of the page, implemented literally and by exhaustive search."""

    def __init__(self, events: list[Event], peers: int) -> None:
        self.events, self.peers = events, peers
        ends = [e["t"] for e in events if e["kind"] == "peer_finished"]
        heard = [e["t"] for e in events if e["peer"] is not None]
        self.begin = next(e["t"] for e in events if e["kind"] == "barrier_released")
        self.end = max(ends or heard)
        self.ids = {e["peer"]: e["peer_id"] for e in events if e["kind"] == "dht_ready"}
        undone = self.undone()
        self.rounds = [
            e
            for e in self.of("round")
            if e["outcome"] in APPLIED and (e["peer"], e["round"]) not in undone
        ]
        self.rounds.sort(key=lambda e: e["t"])

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["kind"] == kind]

    def undone(self) -> set[tuple[str, int]]:
        """Steps made alone or in one of several groups, and undone by a loaded state."""
        lost: set[tuple[str, int]] = set()
        mine: dict[str, list[tuple[str, int]]] = {}
        for event in self.events:
            name = event["peer"]
            if event["kind"] == "state_loaded":
                lost |= set(mine.pop(name, []))
            if event["kind"] not in ("round", "state_round"):
                continue
            everybody = sum(
                e["kind"] == event["kind"]
                and e["round"] == event["round"]
                and e["outcome"] in ("averaged", "partial")
                for e in self.events_of(event["kind"], event["round"])
            )
            grouped = event["outcome"] in ("averaged", "partial")
            if grouped and (event.get("group_size") or 1) >= everybody:
                mine.pop(name, None)
            elif event["kind"] == "round" and event["outcome"] in APPLIED:
                mine.setdefault(name, []).append((name, event["round"]))
        return lost

    def events_of(self, kind: str, number: int) -> list[Event]:
        if not hasattr(self, "_index"):
            self._index: dict[tuple[str, int], list[Event]] = {}
            for e in self.events:
                if e["kind"] in ("round", "state_round"):
                    self._index.setdefault((e["kind"], e["round"]), []).append(e)
        return self._index.get((kind, number), [])

    # -- peers over time ---------------------------------------------------------------------------

    def training(self, name: str) -> tuple[float, float, str | None]:
        """Begin and end of a peer's training, and the kind of its end."""
        replica, _, number = name.partition(".")
        first = {}
        for e in self.events:
            if e["peer"] == name and e["kind"] not in first:
                first[e["kind"]] = e["t"]
        together = not number and int(replica.removeprefix("peer-")) < self.peers
        came = self.begin if together else first.get("training_started", float("inf"))
        ends = [
            (first[kind], kind)
            for kind in ("peer_finished", "left", "peer_failed", "peer_lost")
            if kind in first
        ]
        gone, how = min(ends, default=(self.end, None))
        return came, self.end if how == "peer_finished" else gone, how

    def names(self) -> set[str]:
        return {e["peer"] for e in self.events if e["kind"] == "training_started"}

    def there(self, moment: float) -> set[str]:
        trained = {name: self.training(name) for name in self.names()}
        return {n for n, (came, gone, _) in trained.items() if came <= moment < gone}

    def apart(self, name: str, without: str = "") -> Iterator[tuple[float, float]]:
        healed = {e["fault"]: e["t"] for e in self.of("fault_healed")}
        for e in self.of("fault_fired"):
            counts = e["effect"] in ("stopped", "cut_off") and e["fault"] != without
            if counts and name in e["lives"]:
                yield e["t"], healed.get(e["fault"], self.end)

    def peer_seconds(self, begin: float, end: float) -> float:
        """Seconds of the live peers, integrated from change to change."""
        trained = {name: self.training(name)[:2] for name in self.names()}
        apart = {name: list(self.apart(name)) for name in trained}
        edges = {begin, end}
        for name, (came, gone) in trained.items():
            edges |= {came, gone, *(t for window in apart[name] for t in window)}
        inside = sorted(t for t in edges if begin <= t <= end)
        total = 0.0
        for a, b in pairwise(inside):
            middle = (a + b) / 2
            live = sum(
                came <= middle < gone and not any(x <= middle < y for x, y in apart[name])
                for name, (came, gone) in trained.items()
            )
            total += live * (b - a)
        return total

    # -- one fault -------------------------------------------------------------------------------

    def began(self, fired: Event) -> float:
        own = [e["t"] for e in self.of("sabotaged") if e["fault"] == fired["fault"]]
        if own:
            return min(own)
        begun = fired.get("began", fired["t"])
        told = {e["peer"] for e in self.of("notice") if self.teller(e) == fired["fault"]}
        starts = [fired["t"]]
        gone = []
        for name in fired["lives"]:
            _, ended, how = self.training(name)
            if how in (None, "peer_finished") or ended < begun:
                continue
            if name in told or ended < fired["t"]:
                gone.append(ended)
        return min(gone or starts)

    def teller(self, notice: Event) -> str | None:
        if notice.get("fault"):
            return notice["fault"]  # type: ignore[no-any-return]
        found = None
        for e in sorted(self.of("fault_fired"), key=lambda e: e.get("began", e["t"])):
            before = e.get("began", e["t"]) <= notice["t"]
            if before and e["effect"] == "gone" and notice["peer"] in e["lives"]:
                found = e["fault"]
        return found

    def measure(self, fired: Event) -> dict[str, Any]:
        start = self.began(fired)
        healed = next(
            (e["t"] for e in self.of("fault_healed") if e["fault"] == fired["fault"]), None
        )
        targets = set(fired["lives"])
        survivors = self.there(start) - targets
        everybody = not survivors
        survivors = survivors or self.there(start)

        def progress(event: Event) -> bool:
            if event["t"] <= start or event["peer"] not in survivors:
                return False
            if fired["effect"] == "none" or everybody:
                seen = [
                    e["round"] for e in self.of("round") if e["peer"] in targets and e["t"] <= start
                ]
                return bool(event["round"] > max(seen, default=0))
            back = fired["effect"] in ("stopped", "cut_off") and healed is not None
            if back and event["t"] > healed:  # type: ignore[operator]
                return True
            if event["outcome"] not in ("averaged", "partial"):
                return True
            return not any(self.ids.get(name) in event["group"] for name in targets)

        shown = [e for e in self.rounds if progress(e)]
        return {
            "began": start,
            "detect": shown[0]["t"] - start if shown else None,
            "stall": self.stall(fired["fault"], start, healed, survivors, shown),
            "recover": self.recover(start, shown),
        }

    def stall(
        self,
        fault: str,
        start: float,
        healed: float | None,
        survivors: set[str],
        shown: list[Event],
    ) -> tuple[float, bool] | None:
        found = []
        for name in survivors:
            _, gone, how = self.training(name)
            own = [e["t"] for e in self.rounds if e["peer"] == name and e["t"] > start]
            sure = next((e["t"] for e in shown if e["peer"] == name), None)
            need = None if sure is None else max(sure, healed or sure)
            last = None if need is None else next((t for t in own if t >= need), None)
            points = [start, *(t for t in own if last is None or t <= last)]
            if last is None:
                end = self.end if how == "peer_finished" else gone
                finished = [e["t"] for e in self.of("peer_finished") if e["peer"] == name]
                points.append(max([*finished, *([] if finished else [end]), points[-1]]))
            others = self.apart(name, without=fault)
            hit = any(a < points[-1] and b > start for a, b in others)
            if hit or (last is None and how not in (None, "peer_finished")):
                continue
            gaps = [b - a for a, b in pairwise(points)]
            open_ = last is None and (sure is None or gaps[-1] == max(gaps))
            found.append((max(gaps), open_))
        if not found:
            return None
        return max(gap for gap, _ in found), any(open_ for _, open_ in found)

    def recover(self, start: float, shown: list[Event]) -> float | None:
        swarm: dict[int, list[Event]] = {}
        for e in self.rounds:
            swarm.setdefault(e["round"], []).append(e)
        ordered = sorted(swarm.values(), key=lambda events: min(e["t"] for e in events))
        first_fault = min(self.began(e) for e in self.of("fault_fired"))
        before = [i for i, es in enumerate(ordered) if min(e["t"] for e in es) <= first_fault]
        if len(before) <= 2:
            return None

        def per_peer(i: int, j: int, everyone: bool = False) -> float | None:
            """Samples per second and live peer from the end of round i to that of round j."""
            (t0, c0), (t1, c1) = self.moment(ordered[i]), self.moment(ordered[j])
            live = self.peer_seconds(t0, t1)
            if t1 <= t0 or c1 <= c0 or live <= 0:
                return None
            samples = sum(
                e["samples"]
                for es in ordered[i + 1 : j + 1]
                for e in es
                if everyone or not any(x <= e["t"] <= y for x, y in self.apart(e["peer"]))
            )
            return samples / ((c1 - c0) * live / (t1 - t0))  # type: ignore[no-any-return]

        normal = per_peer(0, before[-1], everyone=True)  # of rounds that began before any fault
        for i, es in enumerate(ordered[:-3]):
            mine = [e["t"] for e in shown if e["round"] == es[0]["round"]]
            now = per_peer(i, i + 3) if mine else None
            if normal is not None and now is not None and now >= 0.9 * normal:
                return float(min(mine) - start)
        return None

    def moment(self, events: list[Event]) -> tuple[float, float]:
        clocks = [e["clock_s"] + self.offset(e["peer"]) for e in events]
        return min(e["t"] for e in events), median(clocks)

    def offset(self, name: str) -> float:
        """Swarm's training clock at the start of a peer: the largest of those that train then."""
        if "." not in name and int(name.removeprefix("peer-")) < self.peers:
            return 0.0
        started = self.training(name)[0]
        found = []
        for other in self.names():
            came, gone, how = self.training(other)
            initial = "." not in other and int(other.removeprefix("peer-")) < self.peers
            came = self.begin if initial else came
            if other == name or came >= started:
                continue
            own = [e for e in self.events if e["peer"] == other and "clock_s" in e]
            told = max([(came, 0.0), *((e["t"], e["clock_s"]) for e in own if e["t"] <= started)])
            later = [e["clock_s"] for e in own if e["t"] > started]
            left = how in ("left", "peer_lost", "peer_failed")
            until = max(told[0], min(started, gone)) if left else started
            clock = min([told[1] + until - told[0], *later])
            found.append((not left or gone > started, self.offset(other) + clock))
        return max(found, default=(True, started - self.begin))[1]


def compare(timeline: Timeline) -> int:
    oracle = Oracle([event.stored() for event in timeline.events], timeline.spec.swarm.peers)
    fired = {e["fault"]: e for e in oracle.of("fault_fired")}
    found = impacts(timeline)
    assert {impact.fault for impact in found} == fired.keys()
    for impact in found:
        expected = oracle.measure(fired[impact.fault])
        about = f"{impact.fault} {impact.kind} {impact.targets}"
        assert impact.fired == pytest.approx(expected["began"], abs=1e-6), about
        assert impact.detect_s == pytest.approx(expected["detect"], abs=1e-5), about
        assert impact.recover_s == pytest.approx(expected["recover"], abs=1e-5), about
        stall = None if impact.stall is None else (impact.stall.seconds, impact.stall.censored)
        assert stall == pytest.approx(expected["stall"], abs=1e-5), about
    return len(found)


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(part, marks=pytest.mark.slow) for part in range(4, 8))]
)
def test_an_independent_implementation_finds_the_same_times(part: int) -> None:
    assert sum(compare(storm(seed).timeline) for seed in range(50 * part, 50 * part + 50)) > 50


def test_group_sizes_are_a_conservative_substitute_for_members() -> None:
    """In logs without the members of groups, a round with a target never counts."""
    same = total = 0
    for seed in range(100):
        story = storm(seed)
        members = impacts(story.timeline)
        for event in story.of("round"):
            del event["group"]
        for ours, theirs in zip(impacts(story.timeline), members, strict=True):
            assert theirs.detect_s is not None or ours.detect_s is None
            assert (ours.detect_s or 1e9) >= (theirs.detect_s or 1e9), seed
            same, total = same + (ours == theirs), total + 1
    assert same > 0.9 * total


def recorded() -> Timeline:
    """Return a real run of four peers: two are stopped and preempted later, two are killed.

    Its events are shortened to what times of faults are made of, with other required fields filled
    in; training began at 1000 s.
    """
    log = Path(__file__).parents[1] / "fixtures" / "pauses.jsonl.gz"
    with gzip.open(log, "rt", encoding="utf-8") as lines:
        events = [load_event(line) for line in lines]
    swarm = SwarmConfig(peers=4, target_batch_size=256)
    return Timeline(make_spec(scenario="pauses", swarm=swarm), events)


def test_a_recorded_run_has_the_same_times() -> None:
    assert compare(recorded()) == 6


def test_pauses_of_a_recorded_run_have_their_true_duration() -> None:
    """A notice some 12 s later must not move the begin of a pause."""
    found = {impact.fault: impact for impact in impacts(recorded())}
    assert [found[name].fired for name in ("f0", "f3")] == pytest.approx(
        [1008.04, 1048.02], abs=0.01
    )
    assert [found[name].detect_s for name in ("f0", "f3")] == pytest.approx([4.23, 2.08], abs=0.01)
    # the round that was told 0.99 s after the kill had the victim in its group
    assert found["f2"].detect_s == pytest.approx(1.32, abs=0.01)
