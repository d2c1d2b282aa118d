"""Priority of a peer's processes among those of its machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: How much nicer a peer is from its first round on. The kernel then gives it a third of the weight.
NICER = 5
_NICEST = 19


def yield_to_starting_peers() -> None:
    """Lower the priority of this peer's session, so that peers that start get the processor.

    A peer that starts needs some seconds of a processor before it can contribute. On a machine
    that other peers keep busy it would get an equal share, and the swarm would lack it for as many
    times longer. Where the kernel groups processes by session it compares the nice values of the
    sessions and not those of their processes (``man 7 sched``, autogroup), so both are set.
    """
    nice = min(os.getpriority(os.PRIO_PGRP, 0) + NICER, _NICEST)
    with contextlib.suppress(OSError):  # no more than speed depends on it
        os.setpriority(os.PRIO_PGRP, 0, nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICER))
