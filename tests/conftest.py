"""Environment of all tests, and the check that no process or file outlives them."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.leaks import TOKEN_VARIABLE, LeakCheck, Watch

# Before anything imports torch or starts Ray; subprocesses and actors inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for name in ("RAY_ADDRESS", "INITIAL_PEERS", "PL_INITIAL_PEERS"):
    os.environ.pop(name, None)

# The same examples in every run: a failure can be repeated, and a green run stays green.
settings.register_profile("rayhive", derandomize=True, deadline=None, database=None)
settings.load_profile("rayhive")


def pytest_configure(config: pytest.Config) -> None:
    """Note what runs and exists before the session; the workers of a session are part of it."""
    if worker := getattr(config, "workerinput", None):
        from tests.workers import give_way

        give_way(worker["workerid"])
    else:
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
        config.pluginmanager.register(LeakCheck(Watch(os.environ[TOKEN_VARIABLE])))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests over workers as :class:`tests.workers.OneSwarm` says."""
    from tests.workers import OneSwarm

    return OneSwarm(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` on a machine without one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the path of a run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def isolated_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give Ray a folder and a token of its own, and return the folder.

    Without it a local cluster would announce itself in the machine's shared folder, where every
    other ``address="auto"`` finds it, and share a token file in the home. The path is short because
    Ray puts sockets below it, whose paths may have 107 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
