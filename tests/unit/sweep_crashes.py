"""A driver in a forked process that is killed, and what every end of its sweep must have in common.

The driver is the real one, with the real storages, files and locks. Its cluster is a
:class:`World`, which dies with it: what remains are the logs of the replicates.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from sqlalchemy import event
from sqlalchemy.engine import Engine

from rayhive import crash_points
from rayhive.events import EventLog, ReplicateFinished, make_event, of_kind, read_events
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from rayhive.sweep.driver import Driver
from rayhive.sweep.resolve import ResolvedStudy
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.signals import Interruption
from rayhive.sweep.storage import expanded, make_storage
from rayhive.sweep.sweep import open_book
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import FakeCluster, Recorder, World

#: File-system changes of CPython, by the names of its audit events.
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.symlink", "os.link", "os.truncate")


@dataclass(frozen=True)
class Place:
    """Where a study is kept, and how it is run.

    Attributes:
        folder: Its run folder.
        url: URL of its trials.
        at_once: Replicates that run at the same time.
    """

    folder: Path
    url: str
    at_once: int = 1

    def drive(
        self,
        study: ResolvedStudy,
        world: World | None = None,
        again: bool = False,
        progress: Recorder | None = None,
    ) -> Recorder:
        """Run one driver to the end of the sweep in this process."""
        study = self.stored(study)
        run, progress = RunFolder(self.folder), progress or Recorder()
        with run.opened(study.config) as identity:
            book = open_book(study, run, identity)
            cluster = FakeCluster(world or World())
            Driver(
                study,
                run,
                book,
                cluster,
                progress,
                Interruption(),
                again=again,
                at_once=self.at_once,
            ).run()
        return progress

    def stored(self, study: ResolvedStudy) -> ResolvedStudy:
        return replace(study, config=study.config.model_copy(update={"storage": self.url}))

    def outwait(self) -> None:
        """Remove the journal's lock of a dead driver, which Optuna does half a minute later."""
        Path(f"{self.folder}.log.lock").unlink(missing_ok=True)

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        storage = make_storage(expanded(self.url))
        (name,) = optuna.get_all_study_names(storage)
        return optuna.load_study(study_name=name, storage=storage).get_trials()


class Deaths:
    """Kills this process before its ``at``-th change of a file or statement to a database."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count, self.off = at, 0, False

    def watch(self) -> None:
        """Count from now on, for good: an audit hook cannot be removed."""
        sys.addaudithook(self._audit)
        event.listen(Engine, "before_cursor_execute", lambda *_: self._step())
        event.listen(Engine, "commit", lambda *_: self._step())

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            mode = arguments[1]
            if mode is not None and set(str(mode)) & set("wax+"):
                self._step()
        elif name in _CHANGES:
            self._step()

    def _step(self) -> None:
        if self.off:
            return
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(action: Callable[[], object], at: int | None = None, armed: Path | None = None) -> int:
    """Run an action in a child that may be killed; return the changes that it made, or -9.

    Args:
        action: The action.
        at: Number of the change before which the child is killed; None for none.
        armed: Folder of the armed crash points.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            if armed is not None:
                os.environ[crash_points.VARIABLE] = str(armed)
            deaths = Deaths(at)
            deaths.watch()
            action()
            deaths.off = True
            os.write(writing, str(deaths.count).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the driver ended with {code}"
    return int(text) if code == 0 else code


def finish_some(folder: Path) -> int:
    """End every second replicate that a dead driver left, as its supervisor would; return them."""
    open_logs = [
        log
        for log in sorted(folder.glob("trials/*/*/events.jsonl"))
        if not list(of_kind(read_events(log), ReplicateFinished)) and log.stat().st_size
    ]
    for log in open_logs[::2]:
        started = next(iter(read_events(log)))
        spec = crash_spec(started)
        file = EventLog(log)
        planned = Log(spec)
        for number in range(spec.swarm.peers):
            for item in planned.of_peer(number):
                file.append(item)
        file.append(make_event("replicate_finished", state="completed", stop_reason="rounds"))
        file.close()
    return len(open_logs[::2])


def crash_spec(started: Any) -> Any:
    from rayhive.spec.replicate import ReplicateSpec

    return ReplicateSpec.model_validate(started.spec)


def coverage(place: Place) -> dict[str, Any]:
    """Return what a finished sweep measured and told, without the numbers of its trials."""
    rows = load_results(place.folder).rows
    told = [trial for trial in place.trials() if trial.state.name == "COMPLETE"]
    return {
        "rows": Counter(
            (row["configuration"], row["scenario"], row["replicate"], row["state"]) for row in rows
        ),
        "told": Counter((_named(trial), tuple(trial.values)) for trial in told),
    }


def _named(trial: optuna.trial.FrozenTrial) -> str:
    return Configuration.model_validate(trial.user_attrs["configuration"]).model_dump_json()


def check_once(place: Place, study: ResolvedStudy) -> None:
    """Check that each replicate finished once and each trial was told once."""
    trials = place.trials()
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
    for trial in trials:
        if trial.state.name == "FAIL":
            assert trial.user_attrs.keys() & {"duplicate_of", "orphan"}, trial
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(complete) == study.config.budget.trials
    expected = {
        place.folder / "trials" / name / f"r{number}-{scenario.name}"
        for name in [*(str(trial.number) for trial in complete), *study.config.baselines]
        for scenario in study.scenarios
        for number in range(study.config.replicates)
    }
    assert set(place.folder.glob("trials/*/*")) == expected
    for folder in expected:
        states = [end.state for end in ends(folder)]
        assert states == ["completed"], (folder, states)


def ends(folder: Path) -> list[ReplicateFinished]:
    """Return the recorded end of every attempt at a replicate."""
    logs: Iterable[Path] = sorted(folder.glob("events*.jsonl"))
    return [end for log in logs for end in of_kind(read_events(log), ReplicateFinished)]
