"""Run the benchmarks one after the other and write the results to ``benchmarks/RESULTS.md``.

Usage: ``python benchmarks/run_all.py [NAME ...]``, with names of scripts without ``.py``. With
names, only these scripts run, and the file is written only with ``--output``, or with ``--update``,
which replaces their results and keeps the others.

A benchmark is a runnable script in this folder; :mod:`benchmarks.claims` defines its last lines.
The exit code is 1 if a script failed, took too long or ended without a claim. A claim that is not
held is a result, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.results_file import Outcome, render, table, updated
from benchmarks.swarm import ROOT, conditions, end_on_sigterm

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "RESULTS.md"
#: Time limit of a script that has no ``LIMIT_S`` of its own [s].
LIMIT_S = 1800.0
#: Time for a script to clean up after its time limit [s].
GRACE = 15.0


def scripts(folder: Path = FOLDER) -> list[str]:
    """Return the names of all runnable scripts in the folder except this one."""
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if path.stem != Path(__file__).stem
        and any(line.startswith("if __name__ ==") for line in path.read_text().splitlines())
    )


def limit_of(name: str, folder: Path = FOLDER) -> float:
    """Return the time limit of a script [s]: its ``LIMIT_S``, or the default."""
    stated = re.search(r"^LIMIT_S = (\d+)$", (folder / f"{name}.py").read_text(), re.MULTILINE)
    return float(stated[1]) if stated else LIMIT_S


def run(name: str, limit: float) -> Outcome:
    """Run a script, and print its output as it appears.

    Args:
        name: Name of the script.
        limit: Time limit [s].
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    process = subprocess.Popen(
        [sys.executable, "-u", str(FOLDER / f"{name}.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        _kill_group(process)

    timer = threading.Timer(limit, stop)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        code = process.wait()
    except BaseException:
        process.terminate()  # lets it clean up
        process.wait(GRACE)
        raise
    finally:
        timer.cancel()
        _kill_group(process)
    failure = f"exit code {code}" if code else ""
    if late.is_set():
        failure = f"it took longer than {limit:g} s"
    return Outcome(name, "".join(lines), failure, time.monotonic() - began, load)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = _processor()
    return f"{conditions()}, {model}, {memory:.0f} GiB memory"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown processor"


def _choose(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[str]:
    known = scripts()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"no benchmark {name!r}{hint} There are: {', '.join(known)}")
    return list(names) or known


def main() -> int:
    """Run the benchmarks, print the summary, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument(
        "--limit", type=float, help="time limit of each script [s]; default: its LIMIT_S, or 1800"
    )
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--output", type=Path, help=f"default: {RESULTS.name} if all run")
    written.add_argument(
        "--update",
        action="store_true",
        help=f"replace the results of NAME in {RESULTS.name}, and keep the others",
    )
    arguments = parser.parse_args()
    names = _choose(parser, arguments.names)
    end_on_sigterm()
    output = arguments.output or (None if arguments.names else RESULTS)
    outcomes, first = [], datetime.datetime.now().astimezone()
    for name in names:
        print(f"== {name}", flush=True)
        began = datetime.datetime.now().astimezone()
        outcomes.append(run(name, limit_of(name) if arguments.limit is None else arguments.limit))
        print(flush=True)
        if arguments.update:
            RESULTS.write_text(updated(RESULTS.read_text(), outcomes[-1:], began))
    print(table(outcomes))
    if output is not None and not arguments.update:
        output.write_text(render(outcomes, first, _machine()))
    claims = [claim for outcome in outcomes for claim in outcome.claims]
    failed = [outcome.name for outcome in outcomes if outcome.problem]
    print(f"\n{sum(claim.held for claim in claims)} of {len(claims)} claims held", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
