"""What a replicate left on a node although it was cleared: there must be nothing.

What belongs to a run is noted before the clearing (:func:`marks`), while the records of its
peers are there, and looked for afterwards (:func:`find`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhive.cluster.node import cgroups, process_group
from rayhive.cluster.node.process_group import OwnedProcesses

#: Where network namespaces that have names are.
NAMESPACES = Path("/run/netns")


def tag(run_id: str) -> str:
    """Return the short name of a run that is part of the names of what is made for it."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Marks:
    """What of a run can be told from anything else on the node.

    Attributes:
        run_id: The run.
        folder: Its folder on the node.
        owned: What each of its peers was seen to own.
    """

    run_id: str
    folder: Path
    owned: tuple[OwnedProcesses, ...]


def marks(run_id: str, folder: Path) -> Marks:
    """Note what belongs to a run, before it is cleared."""
    return Marks(run_id, folder, tuple(owned for _, owned in process_group.records(folder)))


def find(marks: Marks) -> list[str]:
    """Return what is left: processes, sockets, shared memory, mounts, groups, namespaces, files.

    Returns:
        One text each, empty if nothing is left.
    """
    return sorted(
        {
            *_processes(marks),
            *_sockets(marks),
            *_shared_memory(marks),
            *(f"mount {path}" for path in process_group.mounts_below(marks.folder)),
            *_named(marks),
            *([f"folder {marks.folder}"] if marks.folder.exists() else []),
        }
    )


def _processes(marks: Marks) -> Iterator[str]:
    """Yield what lives: recorded ones, and any whose environment names the run's folder.

    A process that was exec'd after its peer got a temporary directory has it there, even if
    it left the peer's session.
    """
    known = {pid for owned in marks.owned for pid in owned.living()}
    inside = f"={marks.folder}/".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            theirs = pid in known or inside in Path(entry.path, "environ").read_bytes()
            if theirs and process_group.started(pid) is not None:
                yield f"process {pid} ({Path(entry.path, 'comm').read_text().strip()})"


def _sockets(marks: Marks) -> Iterator[str]:
    for owned in marks.owned:
        paths = {Path(path) for path in owned.sockets}
        for pid in owned.processes:
            paths.update(process_group.SOCKETS.glob(f"hivemind-{pid}-*.sock"))
        yield from (f"socket {path}" for path in paths if path.exists())


def _shared_memory(marks: Marks) -> Iterator[str]:
    pids = {pid for owned in marks.owned for pid in owned.processes}
    for path in process_group.shared_memory():
        if process_group.creator_of(path) in pids:
            yield f"shared memory {path}"


def _named(marks: Marks) -> Iterator[str]:
    name = tag(marks.run_id)
    for path in cgroups.made_here():
        if f"-{name}-" in path.name:
            yield f"control group {path}"
    if NAMESPACES.is_dir():
        for path in NAMESPACES.iterdir():
            if name in path.name:
                yield f"network namespace {path.name}"
