"""PowerSGD's passes over a dense matrix in host memory, one matrix at a time."""

from __future__ import annotations

import torch

#: Elements handled at once: a MiB of float32, which stays in the cache of a core from the sum to
#: the product.
BLOCK = 2**18


class TorchPasses:
    """Three passes over a contiguous float32 matrix (n, m) with factors of rank r.

    Factors with few rows multiply several times as fast as those with few columns, so P is (r, n)
    and Q is (r, m). Steps that read the result of the previous one work in blocks.
    """

    @staticmethod
    def begin(
        scale: float,
        feedback: torch.Tensor,
        new: torch.Tensor,
        total: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        q: torch.Tensor,
        p: torch.Tensor,
    ) -> None:
        """Set the total to ``scale * feedback + new - left @ right``, and P to ``q @ total.T``."""
        rows, columns = total.shape
        height = max(1, BLOCK // columns)
        for row in range(0, rows, height):
            at = slice(row, row + height)
            block = torch.add(new[at], feedback[at], alpha=scale, out=total[at])
            block.addmm_(left[at], right, alpha=-1)
            torch.mm(q, block.t(), out=p[:, at])

    @staticmethod
    def backproject(p: torch.Tensor, total: torch.Tensor, q: torch.Tensor) -> None:
        """Set Q to ``p @ total``."""
        torch.mm(p, total, out=q)

    @staticmethod
    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Set a matrix to ``left @ right``."""
        torch.mm(left, right, out=out)


def host_passes() -> type[TorchPasses]:
    """Return the compiled passes where numba is installed (the extra ``fast``), else torch's."""
    try:
        from rayhive.compression.powersgd.kernels_numba import CompiledPasses
    except ImportError:
        return TorchPasses
    return CompiledPasses
