"""Checkpoint of a measured peer, on command."""

from __future__ import annotations

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

#: Folder below the peer's temporary directory.
FOLDER = "checkpoints"


def save_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Write a checkpoint. Training goes on if that fails.

    Returns:
        Fields of a ``checkpoint`` event.
    """
    path, began = Path(tempfile.gettempdir()) / FOLDER / "last.ckpt", time.perf_counter()
    error: str | None = None
    try:
        path.parent.mkdir(exist_ok=True)
        trainer.save_checkpoint(path)
    except Exception as failure:
        error = _name(failure)
    return {
        "path": str(path),
        "ok": error is None,
        "bytes": path.stat().st_size if error is None else 0,
        "seconds": time.perf_counter() - began,
        "error": error,
    }


def _name(failure: BaseException) -> str:
    """Return the name of the system error at the root of a failure, such as ENOSPC, or its text."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return errno.errorcode.get(cause.errno, repr(failure))
        cause = cause.__cause__ or cause.__context__
    return repr(failure)
