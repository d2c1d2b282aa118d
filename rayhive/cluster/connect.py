"""Connection of this process to a running Ray cluster."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

import ray

from rayhive.cluster.address import KEY, Target
from rayhive.cluster.embedded import keep_silent, kept_signal_handlers
from rayhive.errors import ConfigError, Problem


def join(target: Target, namespace: str) -> None:
    """Connect this process to a cluster that answered.

    Args:
        target: The cluster.
        namespace: Ray namespace of this process.

    Raises:
        ConfigError: The cluster cannot be joined.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    if target.auth_mode is not None:
        os.environ["RAY_AUTH_MODE"] = target.auth_mode
        # Ray read the variable when it was imported.
        config = getattr(importlib.import_module("ray._raylet"), "Config", None)
        if config is not None:
            config.initialize("")
    # A job brings its working directory. Otherwise a checkout is shipped, and an installed rayhive
    # is expected on the nodes too.
    package = Path(__file__).resolve().parent.parent
    installed = "site-packages" in package.parts or "dist-packages" in package.parts
    ship = not target.in_job and not installed
    try:
        with kept_signal_handlers():
            ray.init(
                address=target.address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"py_modules": [str(package)]} if ship else None,
            )
        keep_silent()
    except Exception as error:
        text = f"a cluster that can be joined: {str(error).strip().splitlines()[0]}"
        raise ConfigError(Problem(KEY, target.address, text)) from error
