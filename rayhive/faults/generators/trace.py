"""Generator ``trace``: replays the removals and arrivals of nodes in a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rayhive.errors import ConfigError, Problem
from rayhive.faults.generators.base import Draft, Generator, Setting
from rayhive.faults.kind import kind_of
from rayhive.faults.traces.formats import MOST_S
from rayhive.faults.traces.trace import Level, Scale, find_trace, fold, read_trace
from rayhive.spec import Model
from rayhive.spec.fault_plan import At
from rayhive.spec.model import LONGEST_S


class TraceSettings(Model):
    """Settings of the replay of a trace.

    Attributes:
        file: The trace: a path relative to the scenario file, or the name of a trace that comes
            with rayhive.
        format: Format of the trace; None recognises it.
        compression: Seconds of the trace in one second of the run.
        start_s: Begin of the window [s of the trace]; None is the first time with most nodes.
        minutes: Length of the window [minutes of the trace]; None is all that follows.
        scale: Number of nodes that corresponds to all peers that start together: ``peak`` is the
            most in the window, ``start`` the number at its begin. With ``start``, more peers may
            join later.
        remove: Kind of fault that removes a replica; its heal brings the replica back.
        notice_s: Notice before a replica is removed [s of the run], for kinds that give one. It is
            shorter if the replica, or the last one that stays, came less than this time before.
        args: Further parameters of that kind.
        steady_s: A replica that came less than this time ago is removed only if there is no
            other [s of the run].
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
class _Replica:
    """A replica during the replay."""

    name: str
    since: float = 0.0
    absence: _Absence | None = None


@dataclass
class _Absence:
    """Absence of a replica.

    Attributes:
        replica: Its name.
        since: Earliest time of the notice: the replica, and one that stays, had come [s].
        went: Time of the removal [s].
        came: Time of the return [s]; None if it does not return.
    """

    replica: str
    since: float
    went: float
    came: float | None = None


class Trace(Generator):
    """Plans a removal for each replica that goes, with its heal if the replica comes back."""

    trace: TraceSettings

    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kind of the removals, and ``join`` if peers may be added."""
        yield self.trace.remove, self.trace.args
        if self.trace.scale == "start":
            yield "join", {}

    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield removals and joins; removals with equal begin and end are one fault."""
        removal = kind_of(self.trace.remove)
        absences, joins = self._follow(setting, self._levels(setting), removal.target_type)
        groups: dict[tuple[float, float, float | None], list[str]] = {}
        for absence in absences:
            notice = max(absence.since, absence.went - self.trace.notice_s)
            groups.setdefault((notice, absence.went, absence.came), []).append(absence.replica)
        for (notice, went, came), names in groups.items():
            fires = round(notice, 3)
            args = dict(self.trace.args)
            if self.trace.notice_s or removal.gives_notice():
                args["notice_s"] = round(went - fires, 3)
            heal = None if came is None else round(came - fires, 3)
            who = tuple(sorted(names, key=lambda name: int(name.rpartition("-")[2])))
            yield Draft(self.trace.remove, who, At(seconds=fires), heal, args, "plan.trace")
        for t_s, name in joins:
            yield Draft("join", (name,), At(seconds=t_s), key="plan.trace")

    def _levels(self, setting: Setting) -> Iterator[Level]:
        settings = self.trace
        try:
            trace = read_trace(find_trace(settings.file, setting.folder), settings.format)
        except ConfigError as error:
            setting.problems.extend(
                Problem(f"plan.trace.{p.key}", p.value, p.allowed, p.nearest)
                for p in error.problems
            )
            return
        setting.warnings.extend(trace.warnings)
        start = trace.peak_s if settings.start_s is None else settings.start_s
        rest = trace.length_s - start
        if rest < 0 or trace.live_at(start) == 0:
            allowed = f"a time at which nodes live, within the {trace.length_s:g} s of the trace"
            setting.problems.append(Problem("plan.trace.start_s", settings.start_s, allowed))
            return
        length = rest if settings.minutes is None else 60.0 * settings.minutes
        peers = setting.swarm.peers
        yield from fold(trace, peers, start, length, settings.compression, settings.scale)

    def _follow(
        self, setting: Setting, levels: Iterable[Level], unit: str
    ) -> tuple[list[_Absence], list[tuple[float, str]]]:
        """Choose the replicas that go at each instant. The longest absent one returns first.

        Returns:
            The absences, and time and name of each joiner.
        """
        absences: list[_Absence] = []
        joins: list[tuple[float, str]] = []
        replicas = [_Replica(f"{unit}-{number}") for number in range(setting.swarm.peers)]
        for level in levels:
            draw = setting.draw("trace", level.t_s)
            living = [replica for replica in replicas if replica.absence is None]
            steady = [
                s for s in living if s.since + self.trace.steady_s <= level.t_s or not s.since
            ]
            others = [replica for replica in living if replica not in steady]
            taken = draw.sample(steady, min(level.gone, len(steady)))
            taken += draw.sample(others, level.gone - len(taken))
            gone = [(replica.absence, replica) for replica in replicas if replica.absence]
            absent = [replica for _, replica in sorted(gone, key=lambda item: item[0].went)]
            stays = min(replica.since for replica in living if replica not in taken)
            for replica in taken:
                replica.absence = _Absence(replica.name, max(replica.since, stays), level.t_s)
                absences.append(replica.absence)
            back = (absent + taken)[: level.come]
            for replica in back:
                assert replica.absence is not None
                replica.absence.came = replica.since = level.t_s
                replica.absence = None
            for _ in range(level.come - len(back)):
                replicas.append(_Replica(f"peer-{len(replicas)}", since=level.t_s))
                joins.append((level.t_s, replicas[-1].name))
        return absences, joins
