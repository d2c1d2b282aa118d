"""Facts about the machine of this process."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import socket
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rayhive.cluster.node import cgroups

#: A unix socket's path has at most 107 bytes; Ray appends about 64 to its directory.
_LONGEST_BASE = 28
PACKAGES = ("rayhive", "torch", "lightning", "hivemind", "ray", "optuna", "numpy")


def short_temporary_directory() -> str:
    """Return the folder for private directories, short enough for the sockets below them.

    ``RAY_TMPDIR`` has precedence over the platform's variables.
    """
    for base in (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir()):
        if base and len(base) <= _LONGEST_BASE and os.access(base, os.W_OK):
            return base
    return "/tmp"


def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that affect results."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def facts() -> dict[str, Any]:
    """Return host name, processor, cores, memory [bytes] and GPUs."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores(),
        "memory": psutil.virtual_memory().total,
        "gpus": gpu_names(),
    }


def cores() -> int:
    """Return the cores that this process may use, by its affinity and its quota of CPU time."""
    usable = len(os.sched_getaffinity(0))
    quota = cgroups.quota()
    return usable if quota >= usable else max(1, math.ceil(quota))


def boot_id() -> str | None:
    """Return the id of the boot of this kernel; None if it does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    return None


def hardware() -> str:
    """Return the hardware of :func:`facts` in one line, for a results table."""
    known = facts()
    gpus = [f"{known['gpus'].count(name)} x {name}" for name in dict.fromkeys(known["gpus"])]
    memory = f"{known['memory'] / 2**30:.0f} GiB"
    return ", ".join([f"{known['cores']} x {known['processor']}", memory, *gpus])


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def gpu_names() -> list[str]:
    """Return the names of NVIDIA GPUs from the kernel driver, without CUDA."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names
