"""Crash points: named transitions at which a process can be made to kill itself, for tests.

``RAYHIVE_CRASH_POINTS`` names a folder. The first process that passes a point while the folder has
a file of its name removes the file and ends by SIGKILL, as in a power failure: nothing is flushed
and no handler runs. One file kills one process, on whichever node of a cluster, and a resumed run
passes the same point alive. A number in the file is the number of passages before the fatal one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal, TypeAlias, get_args

#: Variable of the environment with the folder. Without it a point costs one look-up.
VARIABLE = "RAYHIVE_CRASH_POINTS"

#: Points that the driver passes, in their order.
DriverPoint: TypeAlias = Literal[
    "trial_asked",  # Optuna has the trial, without its configuration
    "trial_recorded",  # ... and with it
    "replicate_prepared",  # its folder has the spec of the attempt
    "supervisor_started",  # its supervisor has answered
    "replicate_followed",  # it runs, and the driver has asked for its outcome once
    "replicate_ended",  # its end is on disk, and its supervisor waits to be released
    "supervisor_released",
    "replicate_folded",  # its row is computed
    "trial_described",  # Optuna has the attributes of the trial's end, and not its values
    "trial_told",
]
#: Points that the supervisor of a replicate passes, in their order.
SupervisorPoint: TypeAlias = Literal[
    "log_begun",  # its first event is on disk
    "room_reserved",  # its peers have a placement group
    "peers_ready",  # every peer is at the barrier
    "training_begun",  # the barrier is released
    "outcome_found",  # its outcome is on disk, and its peers still run
    "peers_ended",  # the nodes are clear
    "end_written",  # its last event is on disk, and the driver does not know
]
#: Points that the agent of a node passes, in their order.
AgentPoint: TypeAlias = Literal[
    "node_prepared",  # a replicate has its folder on the node
    "node_clearing",  # the replicate has ended, and its folder is still there
]

DRIVER_POINTS: tuple[DriverPoint, ...] = get_args(DriverPoint)
SUPERVISOR_POINTS: tuple[SupervisorPoint, ...] = get_args(SupervisorPoint)
AGENT_POINTS: tuple[AgentPoint, ...] = get_args(AgentPoint)


def crash_point(name: DriverPoint | SupervisorPoint | AgentPoint) -> None:
    """Pass a point; end this process if a test asks for it.

    Args:
        name: The point.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    armed = Path(folder) / name
    try:
        left = int(armed.read_text() or 0)
        if left:
            armed.write_text(str(left - 1))
            return
        armed.unlink()  # fails for all but one process
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
