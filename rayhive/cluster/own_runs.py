"""Replicates that drivers on this machine run on clusters of their own.

A driver notes each in the private folder of its cluster, an embedded Ray or a testbed. The folder
goes with the driver.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhive.cluster.node import machine, process_group
from rayhive.cluster.node.processes import started
from rayhive.spec.replicate import ReplicateSpec

#: File with a line of JSON for each replicate that was started.
_FILE = "runs"
#: Variable with the folder of the testbed that this driver has made.
VARIABLE = "RAYHIVE_OWN_RUNS"


@dataclass(frozen=True)
class Driver:
    """A driver with a cluster of its own.

    Attributes:
        pid: Its process.
        started: Start time of the process, which tells it from a later one with its pid.
        study: The study of its last replicate.
        folders: Folders of its replicates, in the order of their first attempts.
    """

    pid: int
    started: int
    study: str
    folders: tuple[Path, ...]


def note(directory: Path, spec: ReplicateSpec) -> None:
    """Note a replicate that runs on the cluster with this folder."""
    with (directory / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"study": spec.study, "folder": spec.folder}) + "\n")


def testbed_folder() -> Path | None:
    """Return the folder of the testbed that this driver has made; None if it made none."""
    found = os.environ.get(VARIABLE)
    return None if found is None else Path(found)


def drivers() -> Iterator[Driver]:
    """Yield the drivers of this user that have started a replicate on a cluster of their own."""
    from rayhive.cluster.testbed.state import owned  # imports pyroute2, which takes long

    base = Path(machine.short_temporary_directory())
    for directory, pid in (*process_group.owned(base), *owned()):
        if (start := started(pid)) is None:
            continue
        try:
            text = (directory / _FILE).read_text(encoding="utf-8")
        except OSError:  # it has not started one, or has just ended
            continue
        whole = text[: text.rfind("\n") + 1]  # the driver may be writing
        runs = [json.loads(line) for line in whole.splitlines()]
        if runs:
            folders = tuple(dict.fromkeys(Path(run["folder"]) for run in runs))
            yield Driver(pid, start, runs[-1]["study"], folders)
