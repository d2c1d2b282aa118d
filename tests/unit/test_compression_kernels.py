"""The passes of PowerSGD over dense matrices, by torch and compiled, beside plain algebra."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from rayhive.compression.powersgd import kernels, kernels_numba

BOTH = pytest.mark.parametrize("how", [kernels, kernels_numba])
#: One row, one column, and sizes with something left over at the end.
SHAPES = [(1, 1), (1, 40), (40, 1), (7, 33), (64, 129)]
RANKS = [1, 2, 3, 4, 5, 8, 9]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@BOTH
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.375, 0.0])
def test_passes_compute_their_definitions(
    scale: float, how: ModuleType, shape: tuple[int, int], rank: int
) -> None:
    rows, columns = shape
    owed, new, total = normal(rows, columns), normal(rows, columns) * 2, torch.full(shape, 7.0)
    left, right, q = normal(rows, rank), normal(rank, columns), normal(rank, columns) * 3
    p, back, product = (
        torch.full((rank, rows), 7.0),
        torch.full_like(q, 7.0),
        torch.full(shape, 7.0),
    )
    inputs = [tensor.clone() for tensor in (owed, new, left, right, q)]

    how.begin(scale, owed, new, total, left, right, q, p)
    expected = scale * owed.double() + new.double() - left.double() @ right.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(p.double(), q.double() @ expected.T, rtol=1e-4, atol=1e-3)

    how.backproject(p, total, back)
    torch.testing.assert_close(back.double(), p.double() @ total.double(), rtol=1e-4, atol=1e-2)

    how.multiply(left, right, product)
    expected = left.double() @ right.double()
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-4)
    for before, after in zip(inputs, (owed, new, left, right, q), strict=True):
        assert torch.equal(before, after), "only what comes out was written"


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_reach_p_and_q(how: ModuleType, bad: float) -> None:
    """A gradient that diverged must show in P and in Q; otherwise it enters the error feedback."""
    new, total, p = normal(9, 33), torch.empty(9, 33), torch.empty(4, 9)
    new[5, 20] = bad
    zeros = torch.zeros(9, 4), torch.zeros(4, 33)
    how.begin(1.0, torch.zeros(9, 33), new, total, *zeros, normal(4, 33), p)
    assert (~p.isfinite()).any(0).tolist() == [row == 5 for row in range(9)]
    q = torch.empty(4, 33)
    how.backproject(normal(4, 9), total, q)
    assert (~q.isfinite()).any(0).tolist() == [column == 20 for column in range(33)]


def test_passes_are_compiled_where_numba_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.host_passes() is kernels_numba
    monkeypatch.delitem(sys.modules, "rayhive.compression.powersgd.kernels_numba")
    monkeypatch.setitem(sys.modules, "numba", None)  # as where it is not installed
    assert kernels.host_passes() is kernels


def test_a_peer_without_powersgd_does_not_import_numba() -> None:
    """A peer without PowerSGD need not pay for it when it starts."""
    code = (
        "import sys, rayhive.peer.process, rayhive.averaging.gradient_averager;"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
