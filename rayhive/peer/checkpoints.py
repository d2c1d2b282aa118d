"""A checkpoint of a measured peer, when somebody asks for one."""

from __future__ import annotations

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

#: Below the peer's temporary directory.
FOLDER = "checkpoints"


def save_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Write a checkpoint; that it cannot be written is no reason to stop training.

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
    """Return the name of the system's error that a failure comes from, else its own."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return errno.errorcode.get(cause.errno, repr(failure))
        cause = cause.__cause__ or cause.__context__
    return repr(failure)
