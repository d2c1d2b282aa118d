"""Seconds of a replicate that are not training, in a sweep and in a fresh Ray job for each.

Claims: a replicate of a sweep costs at most 3 s at the median besides its training (two peers, two
cores, the embedded Ray that a user gets by default), and a fresh ``ray job submit`` for each
replicate costs at least three times as much.

A replicate of a sweep lasts from the end of the one before it to its own end, so that the driver,
Optuna and the table's rows count. The first replicate of each sweep, which also starts Ray and the
warm processes, is printed apart. A job lasts from its submission to the end of the command; it runs
the same study with one replicate. In both, training is the time from the release of the barrier to
the last peer's end of training, as the events on disk state it.

A second table says where the seconds of a further replicate of a sweep go, phase by phase.

Sweeps and jobs take turns. The Ray head for the jobs runs only during their turns, and its start is
not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import ratio
from benchmarks.swarm import ROOT, conditions, end_on_sigterm

LIMIT_S = 3600
BOUND_S = 3.0
BOUND_RATIO = 3.0
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_HEAD_STARTS_S = 120.0
_COMMAND_S = 600.0


def study(replicates: int) -> str:
    """Return a study of one configuration on digits: ten rounds of two peers a replicate."""
    return yaml.safe_dump(
        {
            "name": "overhead",
            "workload": {"name": "digits"},
            "swarm": {"peers": 2, "target_batch_size": 256},
            "replicates": replicates,
            "objectives": {"samples_per_s": "maximize"},
            "budget": {
                "trials": 1,
                "samples_per_replicate": 2560,
                "seconds_per_replicate": 60,
            },
        }
    )


#: Phases of a replicate in their order, each up to the end that :func:`spans` finds for it.
PHASES = (
    "driver, from the end of the replicate before",
    "placing, and start of the peers' processes",
    "their DHT",
    "module, data and optimizer, up to the barrier",
    "training",
    "end of the peers, clean-up",
)


def spans(run: Path) -> list[list[float]]:
    """Return the Unix times of each replicate's start and of the ends of its phases [s], in order.

    Raises:
        RuntimeError: A replicate did not complete.
    """
    from rayhive.events import BarrierReleased, DHTReady, PeerFinished, PeerSpawned, read_events

    found = []
    for log in run.glob("trials/*/*/events.jsonl"):
        events = list(read_events(log))
        if events[-1].get("state") != "completed":
            raise RuntimeError(f"{log} did not complete: {events[-1]}")
        times = [events[0].t]
        for kind in (PeerSpawned, DHTReady, BarrierReleased, PeerFinished):
            times.append(max(event.t for event in events if isinstance(event, kind)))
        found.append([*times, events[-1].t])
    return sorted(found)


def training(times: Sequence[float]) -> float:
    """Return the training of a replicate [s] from its times."""
    return times[4] - times[3]


def further_phases(found: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the duration of each of :data:`PHASES` [s] of every replicate but the first."""
    return [
        [after - before for before, after in itertools.pairwise([earlier[-1], *times])]
        for earlier, times in itertools.pairwise(found)
    ]


def run_command(command: Sequence[str], environment: dict[str, str], log: Path) -> float:
    """Run a command to its end and return its duration [s]."""
    began = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=ROOT,
            timeout=_COMMAND_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return time.monotonic() - began


def sweep_turn(folder: Path, replicates: int) -> tuple[float, list[list[float]]]:
    """Run a sweep; return the cost of the first replicate besides its training [s].

    It counts from the start of the command. The phases of the further ones are returned as well.
    """
    file = folder / "study.yaml"
    file.write_text(study(replicates))
    command = [sys.executable, "experiments/sweep.py", str(file), "--out", str(folder / "run")]
    began = time.time()
    run_command([*command, "--address", "local"], {}, folder / "sweep.log")
    found = spans(folder / "run")
    return found[0][-1] - began - training(found[0]), further_phases(found)


def cost(phases: Sequence[float]) -> float:
    """Return the cost of a replicate besides its training [s]."""
    return sum(phases) - phases[PHASES.index("training")]


def job_turn(folder: Path, web: str, environment: dict[str, str]) -> float:
    """Run one replicate as a fresh job; return its cost besides training [s]."""
    file = folder / "study.yaml"
    file.write_text(study(1))
    command = [*RAY, "job", "submit", "--address", web, "--working-dir", str(ROOT), "--"]
    command += [sys.executable, "experiments/sweep.py", str(file), "--out", str(folder / "run")]
    seconds = run_command(command, environment, folder / "job.log")
    (times,) = spans(folder / "run")
    return seconds - training(times)


@contextlib.contextmanager
def head(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a Ray head; yield the address of its dashboard and the variables of its clients."""
    environment = {"HOME": str(folder), "RAY_TMPDIR": str(folder)}
    port, web = _free_port(), _free_port()
    command = [*RAY, "start", "--head", "--block", "--disable-usage-stats", f"--port={port}"]
    command += ["--include-dashboard=true", f"--dashboard-port={web}", f"--temp-dir={folder}/r"]
    command += ["--object-store-memory=80000000", f"--ray-client-server-port={_free_port()}"]
    command += [f"--dashboard-agent-listen-port={_free_port()}"]
    log = folder / "head.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _HEAD_STARTS_S
        while "started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{web}", environment
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def median_interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).choice(values, (draws, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="turns of sweeps and of jobs")
    parser.add_argument("--replicates", type=int, default=6, help="replicates of a sweep")
    parser.add_argument("--jobs", type=int, default=2, help="jobs of a turn")
    arguments = parser.parse_args()
    end_on_sigterm()
    print(conditions(), flush=True)
    print("| turn | sweep: first [s] | sweep: each further [s] | fresh job each [s] |")
    print("|--:|--:|---|---|", flush=True)
    phases: list[list[float]] = []
    jobs: list[float] = []
    base = Path(tempfile.mkdtemp(prefix="rh-overhead-", dir="/tmp"))
    try:
        for turn in range(arguments.turns):
            places = [base / f"{turn}-{index}" for index in range(arguments.jobs + 1)]
            for place in (*places, base / f"{turn}"):
                place.mkdir()
            first, found = sweep_turn(places[0], arguments.replicates)
            with head(base / f"{turn}") as (web, environment):
                costs = [job_turn(place, web, environment) for place in places[1:]]
            phases += found
            jobs += costs
            columns = map(cost, found), costs
            cells = [" ".join(f"{value:.1f}" for value in column) for column in columns]
            print(f"| {turn + 1} | {first:.1f} | {' | '.join(cells)} |", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(f"\n| phase of a further replicate of a sweep | median of {len(phases)} [s] |\n|---|--:|")
    for name, values in zip(PHASES, zip(*phases, strict=True), strict=True):
        print(f"| {name} | {np.median(values):.2f} |")
    print(flush=True)
    sweeps = [cost(each) for each in phases]
    text = "a replicate of a sweep besides its training, 2 peers, median"
    bound = Claim(text, *median_interval(sweeps), "s", BOUND_S, at_least=False)
    text = "a fresh ray job for each replicate over a sweep, besides training"
    print_claims(bound, Claim(text, *ratio(jobs, sweeps), "x", BOUND_RATIO, at_least=True))


if __name__ == "__main__":
    main()
