"""Commands ``rayhive status`` and ``rayhive stop``, from any terminal.

On a shared cluster the supervisors answer. A cluster of a driver's own, an embedded Ray or a
testbed, is private to it: the status of its replicates is read from the events on disk, and they
are stopped by a signal to the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rayhive import events
from rayhive.cluster import actors, own_runs
from rayhive.cluster.address import resolve
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node.processes import started, wait_until
from rayhive.cluster.replicate.handle import still_running
from rayhive.cluster.replicate.peer_table import Outcome, PeerTable, ReplicateStatus, State
from rayhive.errors import ClusterError, NoAnswerError, RayhiveError
from rayhive.spec.replicate import ReplicateSpec

#: Longest wait for the end of a replicate, or of a driver with its cluster or testbed [s].
_STOP_TIMEOUT = 120.0
#: Phase of a replicate whose supervisor lives and does not answer.
SILENT = "does not answer"


def cluster_status(address: str | None = None) -> list[ReplicateStatus]:
    """Return the status of every running replicate.

    If a supervisor does not answer, only the run id is known, and the phase is :data:`SILENT`.

    Args:
        address: A shared cluster; without one (and without ``RAY_ADDRESS``) the embedded
            clusters and testbeds of this user's drivers on this machine.

    Raises:
        ConfigError: Nothing that can be used answers at the address.
    """
    if resolve(address) is None:
        return [status for driver in own_runs.drivers() for status in _running(driver)]
    with Cluster.connect(address) as cluster:
        found = [_status(cluster, run_id) for run_id in cluster.supervisors()]
        return [status for status in found if status is not None]


def _status(cluster: Cluster, run_id: str) -> ReplicateStatus | None:
    try:
        handle = cluster.peek(run_id)
        return None if handle is None else handle.status()
    except NoAnswerError:
        return ReplicateStatus(run_id, SILENT)
    except ClusterError:  # it has ended since it was listed
        return None


def stop_study(address: str | None, study: str) -> list[str]:
    """End every replicate of a study cleanly, and the agents of the study.

    Args:
        address: A shared cluster; without one (and without ``RAY_ADDRESS``) the embedded
            clusters and testbeds of this user's drivers on this machine.
        study: Name of the study.

    Returns:
        The run ids of the replicates that were running; a driver between two replicates is
        described.

    Raises:
        ConfigError: Nothing that can be used answers at the address.
        NoAnswerError: A supervisor does not answer; the other replicates have been ended.
        ClusterError: A replicate did not end in time.
    """
    if resolve(address) is None:
        return _stop_own(study)
    with Cluster.connect(address) as cluster:
        ours, silent = [], []
        for run_id in cluster.supervisors(study):
            try:
                handle = cluster.peek(run_id)
            except NoAnswerError as error:
                if actors.pending(run_id):  # a supervisor that never got a replicate
                    actors.end(run_id)
                else:
                    silent.append(str(error))
                continue
            if handle is not None and handle.spec.study == study:
                ours.append(handle)
        running = still_running(ours, 0.0)
        for handle in running:
            handle.stop("rayhive stop")
        late = still_running(ours, _STOP_TIMEOUT)
        for handle in ours:
            if handle not in late:
                handle.release()
        if late:
            raise ClusterError(f"{late[0].run_id} did not end within {_STOP_TIMEOUT:g} s")
        cluster.retire([study])
        if silent:
            raise NoAnswerError("; ".join(silent))
        return [handle.run_id for handle in running]


def _stop_own(study: str) -> list[str]:
    ours = [driver for driver in own_runs.drivers() if driver.study == study]
    runs = [run.run_id for driver in ours for run in _running(driver)]
    _terminate(ours)
    return runs or [f"the sweep (pid {driver.pid}) between two replicates" for driver in ours]


def _terminate(drivers: Sequence[own_runs.Driver]) -> None:
    """Send SIGTERM to drivers and wait for their end.

    Raises:
        ClusterError: A driver did not end in time.
    """

    def living() -> list[own_runs.Driver]:
        return [driver for driver in drivers if started(driver.pid) == driver.started]

    for driver in living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver.pid, signal.SIGTERM)
    if not wait_until(lambda: not living(), _STOP_TIMEOUT, every=0.05) and (late := living()):
        raise ClusterError(f"the driver (pid {late[0].pid}) did not end within {_STOP_TIMEOUT:g} s")


def _running(driver: own_runs.Driver) -> list[ReplicateStatus]:
    """Return the status of each replicate of a driver that runs."""
    found = [status_from_disk(folder) for folder in driver.folders]
    return [status for status in found if status is not None and status.outcome is None]


def status_from_disk(folder: Path) -> ReplicateStatus | None:
    """Return the status of a replicate from its events; None if they cannot be read."""
    try:
        log = list(events.read_events(folder / "events.jsonl"))
        spec = ReplicateSpec.model_validate_json((folder / "spec.json").read_bytes())
        return _replayed(spec, log)
    except (OSError, ValueError, LookupError, TypeError, RayhiveError):
        return None


def _replayed(spec: ReplicateSpec, log: Sequence[events.Event]) -> ReplicateStatus:
    peer_table = PeerTable.of(spec)
    since = log[0].t if log else time.time()
    phase, outcome = "placing", None
    for event in log:
        if event.peer is not None:
            _replay(peer_table, event.peer, event)
        elif isinstance(event, events.BarrierReleased):
            phase, since = "training", event.t
        elif isinstance(event, events.ReplicateFinished):
            phase = "finished"
            outcome = Outcome(cast(State, event.state), str(event.stop_reason))
    if phase == "placing" and any(peer.pid is not None for peer in peer_table.peers.values()):
        phase = "starting"
    return peer_table.status(spec, phase, time.time() - since, outcome)


def _replay(peer_table: PeerTable, name: str, event: events.Event) -> None:
    if name not in peer_table.peers:  # it started later
        peer_table.add(name)
    if isinstance(event, events.PeerSpawned):
        peer_table.spawned(name, event.pid, event.host)
    elif isinstance(event, events.PeerLost):
        peer_table.lost(name, str(event.reason))
    else:
        peer_table.take(name, event)
    peer_table.peers[name].heard = event.t
