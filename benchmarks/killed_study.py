"""A study that is killed again and again covers what the uninterrupted one covers.

Claim: a study of 24 configurations, 3 replicates, 2 scenarios and 2 baselines whose processes are
killed ten times at random has each (configuration, scenario, seed) of the uninterrupted study in
its table, each exactly once.

The study is ``benchmarks/killed_study.yaml``. It runs twice, each time on a testbed of its own. In
the second run, SIGKILL hits the driver, the supervisor of the running replicate, or the agent of a
node; a killed driver is started again by the same command. A kill comes at a random share of the
replicates and some seconds later: the seed determines both, and the targets.

Exit code: 0 if the claim is held, 1 if not; the differences are printed before the claim.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import print_fact
from benchmarks.study_coverage import coverage, differences, other_outcomes
from benchmarks.swarm import ROOT, conditions, end_on_sigterm

LIMIT_S = 14400
STUDY = ROOT / "benchmarks" / "killed_study.yaml"
#: Variable that marks every process of a run: its driver, its testbed, and all of their children.
MARK = "RAYHIVE_KILLED_STUDY"
#: Targets and the beginnings of their processes' titles; half of the kills are of drivers.
TITLES = {"supervisor": "ray::TrialSupervisor", "agent": "ray::NodeAgent"}
TARGETS = ("driver", "supervisor", "driver", "agent")
#: A kill comes at most this much after its share of the replicates [s].
SPREAD_S = 10.0
_POLL_S, _REPORT_S = 0.2, 20.0


@dataclass(frozen=True)
class PlannedKill:
    """One kill.

    Attributes:
        share: Share of the replicates that have ended before it.
        delay_s: Time from then to the kill [s].
        target: ``driver``, ``supervisor`` or ``agent``.
    """

    share: float
    delay_s: float
    target: str


def planned_kills(number: int, seed: int) -> list[PlannedKill]:
    """Return kills at random instants, in their order.

    Args:
        number: Number of kills.
        seed: Seed of the instants and of the order of the targets.
    """
    draw = random.Random(seed)
    targets = [TARGETS[index % len(TARGETS)] for index in range(number)]
    draw.shuffle(targets)
    shares = sorted(draw.random() for _ in range(number))
    return [
        PlannedKill(share, draw.uniform(0.0, SPREAD_S), target)
        for share, target in zip(shares, targets, strict=True)
    ]


def marked_actors(title: str, mark: str) -> list[int]:
    """Return the pids of the actors whose processes have a title and a mark.

    Args:
        title: Beginning of the title, such as ``ray::NodeAgent``.
        mark: ``NAME=VALUE`` in the environment of the processes.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            line = process.cmdline()
            if line and line[0].startswith(title):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark.encode() in environment.split(b"\0"):
                    found.append(process.pid)
    return sorted(found)


@dataclass
class Run:
    """A study under way in a process of its own.

    Attributes:
        name: Name in the output.
        command: Command of a driver.
        folder: Run folder.
        total: Replicates of the study.
        environment: Variables of the driver.
        failures: Exit codes of drivers that ended by themselves, and other trouble.
    """

    name: str
    command: Sequence[str]
    folder: Path
    total: int
    environment: dict[str, str]
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self._said = time.monotonic()
        self._ended: set[Path] = set()
        self._first = self.ended()
        self.driver = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start a driver, whose output goes to a file beside the run folder."""
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                cwd=ROOT,
                start_new_session=True,
            )

    def ended(self) -> int:
        """Return the number of replicates that have an outcome on disk."""
        for log in self.folder.glob("trials/*/*/events.jsonl"):
            if log not in self._ended and has_outcome(log):
                self._ended.add(log)
        return len(self._ended)

    def seconds(self) -> float:
        """Return the time since the start [s]."""
        return time.monotonic() - self._began

    def running(self) -> bool:
        """Wait a moment; return whether the driver still runs. Say how far the run is."""
        time.sleep(_POLL_S)
        if time.monotonic() - self._said > _REPORT_S:
            self._said = time.monotonic()
            ended = self.ended()
            text = f"{self.name}: {ended} of {self.total} replicates after {self.seconds():.0f} s"
            if ended > self._first:
                each = self.seconds() / (ended - self._first)
                text += f", {each:.1f} s each, {(self.total - ended) * each / 60:.0f} min left"
            print(text, flush=True)
        return self.driver.poll() is None

    def finish(self) -> None:
        """Wait for the end of the driver; start it once more if it fails."""
        for last in (False, True):
            while self.running():
                pass
            if self.driver.returncode == 0:
                return
            self.failures.append(f"a driver ended with exit code {self.driver.returncode}")
            if not last:
                self.driver = self.start()

    def victims(self, target: str, mark: str) -> list[int]:
        """Return the pids of the processes that are a target now."""
        return [self.driver.pid] if target == "driver" else marked_actors(TITLES[target], mark)

    def kill(self, plan: PlannedKill, draw: random.Random, mark: str) -> dict[str, object] | None:
        """Kill a target at its instant, and start a killed driver again.

        Returns:
            What was killed, and when; None if the run ended before.
        """
        while self.ended() < plan.share * self.total:
            if not self.running():
                return None
        instant = time.monotonic() + plan.delay_s
        pids: list[int] = []
        while time.monotonic() < instant or not (pids := self.victims(plan.target, mark)):
            if not self.running():
                return None
        pid = draw.choice(pids)
        os.kill(pid, signal.SIGKILL)
        at = {"seconds": round(self.seconds(), 2), "ended": self.ended(), "pid": pid}
        if plan.target == "driver":
            self.driver.wait()
            self.driver = self.start()
        return {**asdict(plan), **at}


def has_outcome(log: Path) -> bool:
    """Return whether the last event of a log is the end of a replicate that counts."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        event = json.loads(log.read_bytes().splitlines()[-1])
        return event["kind"] == "replicate_finished" and event["state"] not in ("lost", "stopped")
    return False


@contextlib.contextmanager
def running(
    name: str, folder: Path, arguments: argparse.Namespace, total: int
) -> Iterator[tuple[Run, str]]:
    """Run the study on a testbed of its own; yield the run and the mark of its processes."""
    from rayhive.cluster.testbed.config import TestbedConfig
    from rayhive.cluster.testbed.lifecycle import Testbed
    from rayhive.sweep.resolve import resolve

    study = resolve(arguments.study, overrides(arguments))
    mark = f"{name}-{os.getpid()}"
    os.environ[MARK] = mark
    swarm, later = study.demands.swarm, study.demands.joining
    with Testbed(TestbedConfig.of_swarm(swarm, mark, spare=later)) as testbed:
        command = [sys.executable, str(ROOT / "experiments" / "sweep.py"), str(arguments.study)]
        command += ["--address", testbed.address, "--out", str(folder)]
        for given in overrides(arguments):
            command += ["--set", given]
        run = Run(name, command, folder, total, testbed.variables)
        try:
            yield run, f"{MARK}={mark}"
        finally:
            if run.driver.poll() is None:
                run.driver.kill()
                run.driver.wait()


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the options as fields of the study."""
    given = [*arguments.set]
    if arguments.configurations is not None:
        given.append(f"budget.trials={arguments.configurations}")
    if arguments.replicates is not None:
        given.append(f"replicates={arguments.replicates}")
    return given


def replicates_of(arguments: argparse.Namespace) -> int:
    """Return the number of replicates of the study."""
    from rayhive.sweep.resolve import resolve

    study = resolve(arguments.study, overrides(arguments))
    config = study.config
    return (config.budget.trials + len(config.baselines)) * study.replicates_per_trial


def run_killed(
    folder: Path, arguments: argparse.Namespace, total: int
) -> tuple[list[dict[str, object]], list[str]]:
    """Run the study while its processes are killed; return the kills, and what went wrong."""
    draw = random.Random(arguments.seed + 1)
    done: list[dict[str, object]] = []
    with running("killed", folder, arguments, total) as (run, mark):
        for plan in planned_kills(arguments.kills, arguments.seed):
            kill = run.kill(plan, draw, mark)
            if kill is None:
                break
            done.append(kill)
            print(
                f"kill {len(done)}: {plan.target} (pid {kill['pid']}) after {kill['seconds']} s, "
                f"{kill['ended']} of {total} replicates",
                flush=True,
            )
            Path(f"{folder}.kills.json").write_text(json.dumps(done, indent=1) + "\n")
        run.finish()
    missing = arguments.kills - len(done)
    late = [f"the study ended before {missing} of {arguments.kills} kills"] if missing else []
    return done, [*run.failures, *late]


def compare(base: Path, arguments: argparse.Namespace) -> bool:
    """Run the study twice, print the differences and the claim; return whether it is held."""
    total = replicates_of(arguments)
    whole, killed = base / "uninterrupted", base / "killed"
    with running("uninterrupted", whole, arguments, total) as (run, _):
        run.finish()
    took = run.seconds()
    wrong = [f"uninterrupted: {text}" for text in run.failures]
    began = time.monotonic()
    done, failures = run_killed(killed, arguments, total)
    wrong += [f"killed: {text}" for text in failures]
    first, second = coverage(whole), coverage(killed)
    wrong += differences(second, first)
    if len(first.states) != total:
        wrong.append(f"the uninterrupted run has {len(first.states)} of {total} replicates")
    print("\n| run | seconds | replicates | attempts | Optuna's trials |\n|---|--:|--:|--:|--:|")
    for name, found, seconds in (
        ("uninterrupted", first, took),
        ("killed", second, time.monotonic() - began),
    ):
        cells = (name, f"{seconds:.0f}", len(found.states), found.attempts, len(found.told))
        print(f"| {' | '.join(map(str, cells))} |")
    for text in other_outcomes(second, first):
        print(f"another outcome, no difference of coverage: {text}")
    for text in wrong:
        print(f"difference: {text}")
    hits = Counter(str(kill["target"]) for kill in done)
    targets = ", ".join(f"{name} {number}" for name, number in hits.items())
    print_fact(
        f"a study of {total} replicates, killed {len(done)} times at random ({targets}), covers "
        "what the uninterrupted one covers, each replicate once",
        not wrong,
    )
    return not wrong


def main() -> int:
    """Run, compare and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="?", type=Path, default=STUDY, help="YAML file of the study")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="fields of it")
    parser.add_argument("--configurations", type=int, help="instead of the study's trials")
    parser.add_argument("--replicates", type=int, help="instead of the study's")
    parser.add_argument("--kills", type=int, default=10, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the targets")
    parser.add_argument("--out", type=Path, help="folder of both runs, which is kept; by default a "
                        "temporary one, which is kept only if the claim is not held")  # fmt: skip
    arguments = parser.parse_args()
    end_on_sigterm()
    from rayhive.cluster.testbed import privilege
    from rayhive.errors import ClusterError

    try:
        privilege.require()
    except ClusterError as error:
        print(f"skipped: {error}")
        return 0
    print(f"{conditions()}; instants and targets of seed {arguments.seed}", flush=True)
    base = arguments.out or Path(tempfile.mkdtemp(prefix="rh-killed-", dir="/tmp"))
    base.mkdir(parents=True, exist_ok=True)
    held = compare(base.absolute(), arguments)
    if held and arguments.out is None:
        shutil.rmtree(base, ignore_errors=True)
    else:
        print(f"both runs: {base}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
