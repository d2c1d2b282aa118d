"""Fixtures of several unit tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import rayhive.sweep.target
from benchmarks.virtual_time import VirtualLoop
from rayhive.compression.kernels import eight_bit
from rayhive.registry import FAULTS
from tests.unit.clock_fakes import Clock
from tests.unit.plan_fakes import FAKES, Fake
from tests.unit.sweep_fakes import World


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the width of output to the code: a worker of xdist is told one."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run() -> Iterator[Any]:
    """Return what runs a coroutine in virtual time: no timeout passes while the machine is busy."""
    loop = VirtualLoop()
    yield loop.run
    loop.end()


@pytest.fixture
def clock() -> Clock:
    """Return a clock that the test sets."""
    return Clock()


@pytest.fixture
def fakes() -> Iterator[None]:
    """Replace the fault kinds by fakes without effects."""
    with contextlib.ExitStack() as stack:
        for name, fields in FAKES.items():
            stack.enter_context(FAULTS.replaced(name, type(name, (Fake,), fields)))
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world that takes the place of Ray."""
    world = World()
    monkeypatch.setattr(rayhive.sweep.target, "connect_to_ray", world.connect)
    return world


@pytest.fixture(scope="module", params=["compiled", "torch"])
def loops_of_both_kinds(request: pytest.FixtureRequest) -> Iterator[None]:
    """The 8-bit codecs with numba, and as if numba were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(eight_bit, "loops", lambda: None)
        else:
            assert eight_bit.loops() is not None
        yield
