"""What a run was made with: the code, the packages, the machine, the link."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from rayhive.config import SweepConfig

PACKAGES = ("rayhive", "torch", "lightning", "hivemind", "ray", "optuna", "numpy", "scikit-learn")


def collect(config: SweepConfig) -> dict[str, Any]:
    """Return the content of ``provenance.json``, of this process on this machine."""
    revision, dirty = git_state(Path(__file__).parents[2])
    return {
        "study": config.name,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "link": _link(config),
    }


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return the revision of the code below ``root`` and whether it was changed since.

    Both are None where rayhive does not run from a checkout of its own: an installed package may
    lie inside somebody else's repository.
    """
    if _git(root, "ls-files", "--error-unmatch", "rayhive/__init__.py") is None:
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".")
    return revision, None if changes is None else bool(changes)


def hardware() -> dict[str, Any]:
    """Return the driver's machine: processor, cores, memory, GPUs."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # An uninstalled checkout knows its own version.
        module = sys.modules.get(package)
        return getattr(module, "__version__", None)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return (_output(query) or "").splitlines()


def _link(config: SweepConfig) -> str:
    """Describe what shapes the links: nothing, unless node classes say so."""
    classes = config.swarm.node_classes or {}
    shaped = {name: item.link for name, item in classes.items() if item.link is not None}
    return "; ".join(f"{name}: {link}" for name, link in shaped.items()) or "none"


def _git(root: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    return _output(["git", "-C", str(root), *arguments])


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
