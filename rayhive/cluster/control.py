"""``rayhive status`` and ``rayhive stop``: what runs, and its end, from any terminal.

On a shared cluster the supervisors are asked. An embedded Ray is private to its driver, so
what runs there is read from the events on disk, and stopped by a signal to the driver.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayhive.cluster import actors
from rayhive.cluster.address import resolve
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.embedded import RUNS_FILE
from rayhive.cluster.node import machine, process_group
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.errors import ClusterError, NoAnswerError, RayhiveError
from rayhive.events import Event, read_events
from rayhive.spec.replicate import ReplicateSpec

_STOP_TIMEOUT = 60.0
#: Phase of a replicate whose supervisor lives but keeps silent.
SILENT = "does not answer"


def cluster_status(address: str | None = None) -> list[dict[str, Any]]:
    """Return the status of every replicate that runs, one object each.

    Of one whose supervisor does not answer only the run id is known; its phase says so.

    Args:
        address: A shared cluster; without one (and without ``RAY_ADDRESS``) the embedded
            clusters of this user on this machine.

    Raises:
        ConfigError: Nothing that can be used answers at the address.
    """
    if resolve(address) is None:
        return [status for _, status in _embedded_runs()]
    with Cluster.connect(address) as cluster:
        found = [_status(cluster, run_id) for run_id in cluster.supervisors()]
        return [status for status in found if status is not None]


def _status(cluster: Cluster, run_id: str) -> dict[str, Any] | None:
    try:
        handle = cluster.peek(run_id)
        return None if handle is None else handle.status()
    except NoAnswerError:
        unknown = ("study", "folder", "seconds", "budget_seconds", "outcome")
        return {"run_id": run_id, "phase": SILENT, "peers": {}, **dict.fromkeys(unknown)}
    except ClusterError:  # it has ended since it was listed
        return None


def stop_study(address: str | None, study: str) -> list[str]:
    """End every replicate of a study cleanly, and the agents that serve it.

    Args:
        address: A shared cluster; without one (and without ``RAY_ADDRESS``) the embedded
            clusters of this user on this machine.
        study: Name of the study.

    Returns:
        The run ids of the replicates that were running.

    Raises:
        ConfigError: Nothing that can be used answers at the address.
        NoAnswerError: A supervisor does not answer; the others have been ended.
        ClusterError: Something did not end in time.
    """
    if resolve(address) is None:
        return _stop_embedded(study)
    with Cluster.connect(address) as cluster:
        ours, silent, ended = [], [], []
        for run_id in cluster.supervisors(study):
            try:
                handle = cluster.peek(run_id)
            except NoAnswerError as error:
                if actors.pending(run_id):  # it has not begun, and nobody may start it any more
                    actors.end(run_id)
                    ended.append(run_id)
                else:
                    silent.append(str(error))
                continue
            if handle is not None and handle.spec.study == study:
                ours.append(handle)
        running = [handle for handle in ours if handle.wait(0.0) is None]
        for handle in running:
            handle.stop("rayhive stop")
        deadline = time.monotonic() + _STOP_TIMEOUT
        for handle in ours:
            if handle.wait(max(0.0, deadline - time.monotonic())) is None:
                raise ClusterError(f"{handle.run_id} did not end within {_STOP_TIMEOUT:g} s")
            handle.release()
        cluster.retire_agents([study])
        if silent:
            raise NoAnswerError("; ".join(silent))
        return [*(handle.run_id for handle in running), *ended]


def _stop_embedded(study: str) -> list[str]:
    runs = [(pid, run["run_id"]) for pid, run in _embedded_runs() if run["study"] == study]
    for pid in dict.fromkeys(pid for pid, _ in runs):
        _terminate(pid)
    return [run_id for _, run_id in runs]


def _terminate(pid: int) -> None:
    """Tell a driver to end and wait until it has.

    Raises:
        ClusterError: It did not.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        os.kill(pid, signal.SIGTERM)
        if not select.select([descriptor], [], [], _STOP_TIMEOUT)[0]:
            raise ClusterError(f"the driver (pid {pid}) did not end within {_STOP_TIMEOUT:g} s")
    finally:
        os.close(descriptor)


def _embedded_runs() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the pid of the driver and the status of each replicate on an embedded cluster."""
    for directory, pid in process_group.owned(Path(machine.short_temporary_directory())):
        path = directory / RUNS_FILE
        lines = (
            path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        )
        for line in lines:
            try:
                folder = Path(json.loads(line)["folder"])
            except (ValueError, LookupError, TypeError):  # its writer died while it wrote
                continue
            status = status_from_disk(folder)
            if status is not None and status["outcome"] is None:
                yield pid, status


def status_from_disk(folder: Path) -> dict[str, Any] | None:
    """Return the status of a replicate as its events tell it.

    None if there are none yet, or they can't be read.
    """
    try:
        return _status_from_disk(folder)
    except (OSError, ValueError, LookupError, TypeError, RayhiveError):
        return None


def _status_from_disk(folder: Path) -> dict[str, Any]:
    events = list(read_events(folder / "events.jsonl"))
    spec = ReplicateSpec.model_validate_json((folder / "spec.json").read_bytes())
    peer_table = PeerTable([spec.peer_spec(peer).name for peer in range(spec.swarm.peers)])
    phase, since, outcome = "placing", events[0]["t"] if events else time.time(), None
    heard: dict[str, float] = {}
    for event in events:
        name = event["peer"]
        if name is not None:
            heard[name] = event["t"]
            _replay(peer_table, name, event)
        elif event["kind"] == "barrier_released":
            phase, since = "training", event["t"]
        elif event["kind"] == "replicate_finished":
            phase, outcome = "finished", {k: event[k] for k in ("state", "stop_reason")}
    peers = {name: peer.status() for name, peer in peer_table.peers.items()}
    for name, peer in peers.items():
        peer["last_event_age"] = time.time() - heard.get(name, since)
        if phase == "placing" and peer["pid"] is not None:
            phase = "starting"
    return {
        "run_id": spec.run_id,
        "study": spec.study,
        "folder": str(folder),
        "phase": phase,
        "seconds": time.time() - since,
        "budget_seconds": spec.budget.seconds_per_replicate,
        "outcome": outcome,
        "peers": peers,
    }


def _replay(peer_table: PeerTable, name: str, event: Event) -> None:
    if name not in peer_table.peers:  # it came later
        peer_table.add(name)
    if event["kind"] == "peer_spawned":
        peer_table.spawned(name, int(event["pid"]), str(event["host"]))
    elif event["kind"] == "peer_lost":
        peer_table.lost(name, str(event["reason"]))
    else:
        peer_table.take(name, event)
