"""Run folder of a study: its files, its lock, and the checks before a run is resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import yaml

from rayhive.errors import ConfigError, DamagedError, Problem, RayhiveError
from rayhive.events import ReplicateFinished, of_kind, read_events
from rayhive.files import is_unfinished, write_atomically
from rayhive.spec import SweepConfig
from rayhive.spec.moved import moved_to_space
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import read_spec, set_aside
from rayhive.sweep.provenance import Fingerprint, collect, read_fingerprint
from rayhive.sweep.resolve import ResolvedScenario
from rayhive.sweep.resumption import differences, plan_problem

#: States of a replicate that measured its configuration.
MEASURED = ("completed", "timed_out", "diverged")

SWEEP, PROVENANCE, LOCK = "sweep.yaml", "provenance.json", "driver.lock"

#: Errors of a disk that cannot be written at all.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
#: The same errors in SQLite, which reports them as text only.
_SQLITE = ("database or disk is full", "disk I/O error", "attempt to write a readonly database")

_RUN = re.compile(r'"run":\s*"([0-9a-f]{32})"')


def replicate_folder(run: Path, trial: int | str, replicate: int, scenario: str) -> Path:
    """Return the folder of a replicate of a trial, or of the baseline with that name."""
    return run / "trials" / str(trial) / f"r{replicate}-{scenario}"


class RunFolder:
    """Run folder of one study.

    Args:
        path: The folder; it need not exist.

    Attributes:
        before: The study that the folder held when it was opened; None for a new folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.before: SweepConfig | None = None

    def replicate(self, trial: int | str, replicate: int, scenario: str) -> Path:
        """Return the folder of one replicate of a trial, or of the baseline with that name."""
        return replicate_folder(self.path, trial, replicate, scenario)

    @property
    def is_running(self) -> bool:
        """Whether a driver works in this folder now."""
        return self._locked_by() is not None

    @property
    def has_trials(self) -> bool:
        """Whether any replicate was ever prepared here."""
        trials = self.path / "trials"
        return trials.is_dir() and any(trials.iterdir())

    def check(self, config: SweepConfig) -> Iterator[Problem]:
        """Yield the reasons against running ``config`` in this folder; nothing is written."""
        problem = self._unwritable()
        if problem is not None:
            yield problem
        elif (self.path / SWEEP).exists():
            owner = self._locked_by()
            if owner is not None:
                yield self._in_use(owner)
            yield from self._differences(config)
        elif self.path.exists() and any(
            item.name != LOCK and not is_unfinished(item) for item in self.path.iterdir()
        ):
            yield self._refused("a run folder, or one that is empty or new")

    def check_plans(self, scenarios: Iterable[ResolvedScenario]) -> Iterator[Problem]:
        """Yield a problem for each scenario that plans other faults than its replicates had.

        Args:
            scenarios: The scenarios with their plans, on the target of the run.
        """
        for scenario in scenarios:
            found = (
                plan_problem(scenario.name, spec.plan, spec.in_own_rounds(plan), folder)
                for number, plan in enumerate(scenario.plans)
                for folder, spec in islice(self._recorded(scenario.name, number), 1)
            )
            yield from islice((problem for problem in found if problem is not None), 1)

    def _recorded(self, scenario: str, number: int) -> Iterator[tuple[Path, ReplicateSpec]]:
        """Yield the folder and the spec of each replicate of a number that has started."""
        for folder in sorted(self.path.glob(f"trials/*/r{number}-{scenario}")):
            if any(folder.glob("events*.jsonl")):
                with suppress(OSError, ValueError):
                    yield folder, read_spec(folder)

    def check_code(self, config: SweepConfig, now: Fingerprint) -> Iterator[Problem]:
        """Yield a problem if the run has measurements of other code or data."""
        before = self._fingerprint()
        differences = [] if before is None else now.differences(before)
        if differences and self.has_measured:
            by_name = config.workload.import_path is None
            yield Problem(
                "workload.name" if by_name else "workload.import",
                config.workload.label,
                f"the code and data of the run in {self.path} ({'; '.join(differences)}): restore "
                "them, begin a new run with --out or another name, keep the two apart with "
                "--code keep-apart, or declare them equivalent with --code accept",
            )

    def continued(self, now: Fingerprint, accept: bool) -> Fingerprint:
        """Return ``now``, with the digest of the earlier fingerprint if the two are equivalent.

        Args:
            now: Fingerprint of the workload's present code and data.
            accept: Whether the user declares a changed workload equivalent.
        """
        before = self._fingerprint()
        if before is None:
            return now
        if accept:
            return now.model_copy(update={"accepted": before.digest})
        same = not now.differences(before)
        return now.model_copy(update={"accepted": before.accepted}) if same else now

    def _fingerprint(self) -> Fingerprint | None:
        return read_fingerprint((self._provenance() or {}).get("fingerprint"))

    def _provenance(self) -> dict[str, Any] | None:
        """Return the content of ``provenance.json``, empty without it; None if it is damaged."""
        try:
            found = json.loads((self.path / PROVENANCE).read_text("utf-8", errors="replace"))
            run, earlier = found.get("run", ""), found.get("earlier", [])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, AttributeError):  # the last: not a mapping
            return None
        return dict(found) if isinstance(run, str) and isinstance(earlier, list) else None

    def replicates(self, place: int | str) -> list[Path]:
        """Return the existing folders of the replicates of a trial or baseline."""
        return sorted((self.path / "trials" / str(place)).glob("r*-*/"))

    @property
    def has_measured(self) -> bool:
        """Whether any replicate measured its configuration; without one no results can be mixed."""
        for log in self.path.glob("trials/*/*/events*.jsonl"):
            with suppress(DamagedError):
                finished = of_kind(read_events(log), ReplicateFinished)
                if any(event.state in MEASURED for event in finished):
                    return True
        return False

    @contextmanager
    def opened(self, config: SweepConfig, code: Fingerprint | None = None) -> Iterator[str]:
        """Lock the folder for one driver, and write ``sweep.yaml`` and ``provenance.json``.

        Args:
            config: The study.
            code: Fingerprint of its workload.

        Yields:
            The identity of the run, which stays the same over all sessions.

        Raises:
            ConfigError: Another driver holds the lock, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a+", encoding="utf-8", errors="replace")
        except OSError as error:
            allowed = f"a folder that can be written ({error.strerror})"
            raise ConfigError(self._refused(allowed)) from error
        with lock:
            # The kernel releases the lock when this process dies, in whatever way.
            if not _lock(lock, fcntl.LOCK_EX):
                raise ConfigError(self._in_use(_owner(lock)))
            with suppress(OSError, ValueError):
                self.before = self._study()
            lock.seek(0)
            known = _RUN.search(lock.read())
            provenance = self._describe(config, code, None if known is None else known[1])
            described = json.dumps(provenance, indent=1) + "\n"
            for name, text in ((SWEEP, config.to_yaml()), (PROVENANCE, described)):
                write_atomically(self.path / name, text)
            run = str(provenance["run"])
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {os.uname().nodename}\n" + f'"run": "{run}"\n')
            lock.flush()
            yield run

    def _describe(
        self, config: SweepConfig, code: Fingerprint | None, known: str | None
    ) -> dict[str, Any]:
        """Return the provenance of this session, with that of earlier ones that differ.

        Args:
            config: The study.
            code: Fingerprint of its workload.
            known: Identity of the run in the lock file, for a damaged ``provenance.json``.
        """
        before = self._provenance()
        if before is None:
            file = self.path / PROVENANCE
            found = _RUN.search(file.read_text("utf-8", errors="replace"))
            before = {} if found is None else {"run": found[1]}
            set_aside(file)
        run = before.pop("run", None) or known or uuid.uuid4().hex
        earlier = before.pop("earlier", [])
        now = collect(config)
        if code is not None:
            now["fingerprint"] = code.model_dump(exclude_none=True)
        if before and _timeless(before) != _timeless(now):
            earlier = [*earlier, before]
        elif before:
            now["started"] = before.get("started", now["started"])
        return {"run": run, **now, **({"earlier": earlier} if earlier else {})}

    def _unwritable(self) -> Problem | None:
        """Return a problem if the first existing part of the path cannot be written."""
        try:
            part = next(each for each in (self.path, *self.path.parents) if each.exists())
        except OSError as error:
            return self._refused(f"a folder that can be written ({error.strerror})")
        if not part.is_dir():
            return self._refused(f"a folder, but {part} is a file")
        if not os.access(part, os.W_OK | os.X_OK):
            return self._refused(f"writable, but {part} is not")
        return None

    def _locked_by(self) -> str | None:
        """Return the process that holds the lock, if any."""
        try:
            with (self.path / LOCK).open(encoding="utf-8", errors="replace") as lock:
                return None if _lock(lock, fcntl.LOCK_SH) else _owner(lock)
        except OSError:
            return None

    def _in_use(self, owner: str) -> Problem:
        return self._refused(f"a folder that no other driver uses; {owner} does")

    def _refused(self, allowed: str) -> Problem:
        return Problem("--out", str(self.path), allowed)

    def _study(self) -> SweepConfig:
        """Return the study in the folder.

        Raises:
            OSError: There is none, or it cannot be read.
            ValueError: It is not valid.
        """
        try:
            text = (self.path / SWEEP).read_text(encoding="utf-8")
            data = yaml.safe_load(text)
            if isinstance(data, Mapping):
                data = moved_to_space(data, warn=False)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return SweepConfig.model_validate(data)

    def _differences(self, config: SweepConfig) -> Iterator[Problem]:
        try:
            before = self._study()
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            yield self._refused(f"a run folder; its {SWEEP} is not valid: {first}")
            return
        yield from differences(before, config, self.path)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn errors of a disk that cannot be written into one :class:`RayhiveError`.

    Args:
        folder: The folder that is written to.

    Raises:
        RayhiveError: The disk is full or can't be written.
    """
    try:
        yield
    except Exception as error:
        reason = _disk_trouble(error)
        if reason is None:
            raise
        raise RayhiveError(
            f"{folder} can't be written: {reason}. Finished replicates are kept; once there is "
            "room, the same command resumes the sweep"
        ) from None


def _disk_trouble(error: BaseException | None) -> str | None:
    """Return the error text of a disk that caused an error, None if no disk did."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return error.strerror
        found = [text for text in _SQLITE if text in str(error)]
        if found:
            return found[0]
        error = error.__cause__ or error.__context__
    return None


def _timeless(session: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in session.items() if key != "started"}


def _lock(file: IO[str], kind: int) -> bool:
    """Lock a file until it is closed; return False if another process holds it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks gives no protection, but the sweep can run on it.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _owner(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.readline().strip() or "another process"
