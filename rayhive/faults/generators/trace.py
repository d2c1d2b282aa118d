"""The replay of a trace: what a cloud took away is taken away, what it gave is started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from rayhive.errors import ConfigError, Problem
from rayhive.faults.generators.base import Draft, Generator, Setting, unit_of
from rayhive.faults.queries import gives_notice
from rayhive.faults.traces.folding import Level, Scale, fold
from rayhive.faults.traces.trace import MOST_S, find_trace, read_trace
from rayhive.spec import LONGEST_S, Model
from rayhive.spec.fault_plan import At


class TraceSettings(Model):
    """How a trace is replayed.

    Attributes:
        file: The trace: a path from the scenario file's folder, or the name of one that comes
            with rayhive.
        format: Its format; by default it is recognised.
        compression: Seconds of the trace in a second of the run.
        start_s: Where the window begins [s of the trace]; None is where most nodes lived first.
        minutes: How long the window is [minutes of the trace]; None takes all that follows.
        scale: What stands for all the peers that start together: the most nodes that lived in the
            window, or as many as lived at its start; what exceeds them then joins.
        remove: Kind of fault that takes a slot away; the heal brings it back.
        notice_s: Notice before a slot is gone [s of the run], for kinds that give one; shorter
            where the slot, or the one that is left without it, came less than so long before.
        args: Further parameters of that kind.
        steady_s: A slot that came less than so long ago is taken only if there is no other
            [s of the run].
    """

    file: str
    format: str | None = None
    compression: float = Field(default=60.0, ge=1e-3, le=1e9)
    start_s: float | None = Field(default=None, ge=0, le=MOST_S)
    minutes: float | None = Field(default=None, gt=0, le=MOST_S)
    scale: Scale = "peak"
    remove: str = "preempt"
    notice_s: float = Field(default=0.0, ge=0, le=LONGEST_S)
    args: dict[str, Any] = Field(default_factory=dict)
    steady_s: float = Field(default=5.0, ge=0, le=LONGEST_S)


@dataclass
class _Slot:
    """One slot while the trace is followed."""

    name: str
    since: float = 0.0
    gone: float | None = None


@dataclass
class _Absence:
    """A slot that is away.

    Attributes:
        slot: Its name.
        since: When it could be told of its end: it had come, and so had one that stays [s].
        went: When it went [s].
        came: When it came back [s].
    """

    slot: str
    since: float
    went: float
    came: float | None = None


@dataclass
class _Replay:
    """What a trace does to slots."""

    absences: list[_Absence] = field(default_factory=list)
    joins: list[tuple[float, str]] = field(default_factory=list)


class TraceReplay(Generator):
    """Plans a removal for each slot that goes, with its heal where the slot comes back."""

    trace: TraceSettings

    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kind of the removals, and ``join`` where peers may be added."""
        kinds = [self.trace.remove, *(["join"] if self.trace.scale == "start" else [])]
        return [(kind, {}) for kind in kinds]

    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield removals and joins; those of one instant that also end together are one fault."""
        levels = self._levels(setting)
        if levels is None:
            return
        unit = unit_of(self.trace.remove)
        replay = self._follow(setting, levels, unit)
        groups: dict[tuple[float, float, float | None], list[str]] = {}
        for absence in replay.absences:
            told = max(absence.since, absence.went - self.trace.notice_s)
            groups.setdefault((told, absence.went, absence.came), []).append(absence.slot)
        for (told, went, came), slots in groups.items():
            fires = round(told, 3)
            args = dict(self.trace.args)
            if self.trace.notice_s or gives_notice(self.trace.remove):
                args["notice_s"] = round(went - fires, 3)
            heal = None if came is None else round(came - fires, 3)
            yield Draft(
                self.trace.remove, _ordered(slots), At(seconds=fires), heal, args, "plan.trace"
            )
        for t_s, slot in replay.joins:
            yield Draft("join", (slot,), At(seconds=t_s), key="plan.trace")

    def _levels(self, setting: Setting) -> list[Level] | None:
        settings = self.trace
        try:
            trace = read_trace(find_trace(settings.file, setting.folder), settings.format)
        except ConfigError as error:
            setting.problems.extend(
                Problem(f"plan.trace.{p.key}", p.value, p.allowed, p.nearest)
                for p in error.problems
            )
            return None
        setting.warnings.extend(trace.warnings)
        start = trace.peak_s if settings.start_s is None else settings.start_s
        rest = trace.length_s - start
        if rest < 0 or trace.live_at(start) == 0:
            setting.problems.append(
                Problem(
                    "plan.trace.start_s",
                    settings.start_s,
                    f"a moment at which nodes live, of the trace's {trace.length_s:g} s",
                )
            )
            return None
        length = rest if settings.minutes is None else 60.0 * settings.minutes
        return list(
            fold(trace, setting.swarm.peers, start, length, settings.compression, settings.scale)
        )

    def _follow(self, setting: Setting, levels: Iterable[Level], unit: str) -> _Replay:
        """Choose who goes at each instant; who has been away longest comes back first."""
        replay = _Replay()
        slots = [_Slot(f"{unit}-{number}") for number in range(setting.swarm.peers)]
        away: dict[str, _Absence] = {}
        for level in levels:
            draw = setting.draw("trace", level.t_s)
            living = [slot for slot in slots if slot.gone is None]
            steady = [
                s for s in living if s.since + self.trace.steady_s <= level.t_s or not s.since
            ]
            others = [slot for slot in living if slot not in steady]
            taken = draw.sample(steady, min(level.gone, len(steady)))
            taken += draw.sample(others, level.gone - len(taken))
            absent = sorted(
                (slot for slot in slots if slot.gone is not None), key=lambda slot: slot.gone or 0.0
            )
            stays = min(slot.since for slot in living if slot not in taken)
            for slot in taken:
                slot.gone = level.t_s
                away[slot.name] = _Absence(slot.name, max(slot.since, stays), level.t_s)
                replay.absences.append(away[slot.name])
            back = (absent + taken)[: level.come]
            for slot in back:
                away.pop(slot.name).came = level.t_s
                slot.gone, slot.since = None, level.t_s
            for _ in range(level.come - len(back)):
                slots.append(_Slot(f"peer-{len(slots)}", since=level.t_s))
                replay.joins.append((level.t_s, slots[-1].name))
        return replay


def _ordered(slots: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(slots, key=lambda name: int(name.rpartition("-")[2])))
