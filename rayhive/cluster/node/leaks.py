"""Check for processes, files and kernel objects of a run that remain after its cleanup.

:func:`marks` records the resources of a run before the cleanup, while the records of its peers
exist. :func:`find` looks for them afterwards.
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

#: Folder of the named network namespaces.
NAMESPACES = Path("/run/netns")


def tag(run_id: str) -> str:
    """Return the short name of a run, which the names of its kernel objects contain."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Marks:
    """Resources of a run, as far as they can be told from others on the node.

    Attributes:
        run_id: The run.
        folder: Its folder on the node.
        owned: Recorded processes and files of each of its peers.
    """

    run_id: str
    folder: Path
    owned: tuple[OwnedProcesses, ...]


def marks(run_id: str, folder: Path) -> Marks:
    """Record the resources of a run before its cleanup."""
    return Marks(run_id, folder, tuple(owned for _, owned in process_group.records(folder)))


def find(marks: Marks) -> list[str]:
    """Return the remains of a run, one text each.

    They are processes, sockets, shared memory, mounts, control groups, network namespaces and the
    run's folder.
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
    """Yield living processes that were recorded, or whose environment names the run's folder.

    The environment of a process that was exec'd by a peer names the peer's temporary directory,
    even if the process left the peer's session.
    """
    known = {pid for owned in marks.owned for pid in owned.living()}
    inside = f"={marks.folder}/".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            belongs = pid in known or inside in Path(entry.path, "environ").read_bytes()
            if belongs and process_group.started(pid) is not None:
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
