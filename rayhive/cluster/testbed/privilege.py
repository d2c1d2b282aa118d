"""Privileges that a testbed needs, and the faults that work without one."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rayhive.cluster.testbed import namespaces, veth
from rayhive.errors import ClusterError
from rayhive.registry import FAULTS

#: Capabilities that only a testbed has.
GIVEN = ("link", "node")
T = TypeVar("T")
_ADMIN = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def lacking() -> str | None:
    """Return why this machine does not allow a testbed; None if it does."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    missing = [name for name, bit in _ADMIN.items() if not _effective() >> bit & 1]
    if missing:
        return f"this process lacks {' and '.join(missing)}: run it as root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK) and not in_new_namespace(
        veth.kernel_delays
    ):
        return "the kernel has no netem, and there is no /dev/net/tun: links could not be delayed"
    return None


def require() -> None:
    """Check that this machine allows a testbed.

    Raises:
        ClusterError: It does not; the text has the reason and the faults that work without one.
    """
    reason = lacking()
    if reason is not None:
        raise ClusterError(f"no testbed on this machine: {reason}; {_faults_without_testbed()}")


def _faults_without_testbed() -> str:
    """Return a text with the kinds of faults that work without a testbed."""
    kinds = [name for name, kind in FAULTS.items() if not set(GIVEN) & set(kind.needs)]
    lost = [name for name in FAULTS.names() if name not in kinds]
    text = f"faults that work without one: {', '.join(kinds)}" if kinds else "no fault remains"
    return f"{text}; those that need one: {', '.join(lost)}" if lost else text


def _effective() -> int:
    """Return the effective capabilities of this process, one bit each."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def in_new_namespace(do: Callable[[], T]) -> T:
    """Call a function in a network namespace that exists during the call only."""
    name = f"rhp-{secrets.token_hex(4)}"
    namespaces.create(name)
    try:
        return namespaces.inside(name, do)
    finally:
        namespaces.remove(name)
