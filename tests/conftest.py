"""Environment of all tests, and the check that no process or file outlives them."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.leaks import TOKEN_VARIABLE, Watch, strangers

# Before anything imports torch or starts Ray; subprocesses and actors inherit it.
TOKEN = os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for name in ("RAY_ADDRESS", "INITIAL_PEERS", "PL_INITIAL_PEERS"):
    os.environ.pop(name, None)

# The same examples in every run: a failure can be repeated, and a green run stays green.
settings.register_profile("rayhive", derandomize=True, deadline=None, database=None)
settings.load_profile("rayhive")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` on a machine without one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def nothing_survives() -> Iterator[None]:
    """Fail the session if a process, shared memory or a socket of its own outlives it."""
    watch = Watch(TOKEN)
    company = strangers(TOKEN)
    yield
    leaks = watch.processes(patience_s=10.0)
    files = watch.new_files(patience_s=2.0)
    if files and (company or strangers(TOKEN)):
        text = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
        warnings.warn(f"left behind, perhaps by another session: {text}", stacklevel=1)
    else:
        leaks += files
    if leaks:
        pytest.fail("left behind by this test session:\n  " + "\n  ".join(leaks), pytrace=False)


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
