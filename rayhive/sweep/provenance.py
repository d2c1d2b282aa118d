"""Provenance of a run: code, packages, machine and link."""

from __future__ import annotations

import functools
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rayhive
from rayhive.cluster.node import machine

if TYPE_CHECKING:
    from rayhive.spec import SweepConfig

_CHECKOUT = Path(__file__).parents[2]


def collect(config: SweepConfig) -> dict[str, Any]:
    """Return the content of ``provenance.json`` for this process on this machine."""
    revision, dirty = git_state(_CHECKOUT)
    return {
        "study": config.name,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        # A checkout that is not installed has no package metadata.
        "versions": {**machine.versions(), "rayhive": rayhive.__version__},
        "hardware": machine.facts(),
        "link": _link(config),
    }


@functools.cache
def code_revision() -> str | None:
    """Return the git revision of the running code, marked if the code has changed since."""
    revision, dirty = git_state(_CHECKOUT)
    return f"{revision} with changes" if dirty else revision


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return the git revision of the code below ``root``, and whether it has changed since.

    Both are None if rayhive does not run from its own checkout: an installed package may lie inside
    the repository of another project.
    """
    if _git(root, "ls-files", "--error-unmatch", "rayhive/__init__.py") is None:
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".")
    return revision, None if changes is None else bool(changes)


def _link(config: SweepConfig) -> str:
    """Return the shaping of the links by node class, or ``none``."""
    classes = config.swarm.node_classes or {}
    shaped = {name: item.link for name, item in classes.items() if item.link is not None}
    return "; ".join(f"{name}: {link}" for name, link in shaped.items()) or "none"


def _git(root: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    return _output(["git", "-C", str(root), *arguments])


def _output(command: list[str]) -> str | None:
    """Return the output of a command; None if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
