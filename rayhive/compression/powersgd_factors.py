"""PowerSGD's arithmetic for one peer: error feedback, factors, and what a round makes of them.

A round is bound by memory, so that what counts is how often a dense array is read or written. What
is owed is kept as a dense buffer less a product of factors, those that were applied last: the
product is subtracted where the next round reads the buffer anyway. The sum of what is owed and the
gradient goes into a second buffer; a commit only lets the buffers change places. So a round changes
nothing until :meth:`Factors.commit`, and the step back is possible until the next round, for a
caller that hears late that its round did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch

from rayhive.compression.passes import TorchPasses, host_passes
from rayhive.compression.powersgd_shapes import Shape, factor_rank, matrix_dims

Tensors = list[torch.Tensor]


class Stack:
    """The matrices of one shape, which are multiplied together.

    Args:
        members: Positions of the matrices among all that are factorised.
        shape: Rows n and columns m.
        rank: Columns of the factors.
        device: Where they are multiplied; the factors themselves are always in host memory.

    Attributes:
        q: What the next round begins with, (k, m, r), shared between the processes of a peer.
    """

    def __init__(
        self, members: tuple[int, ...], shape: tuple[int, int], rank: int, device: torch.device
    ) -> None:
        self.members, self._shape, self._rank, self._device = members, shape, rank, device
        # On a GPU all matrices at once: there, every operation is slow to start.
        self._passes = host_passes() if device.type == "cpu" else None
        self.q = torch.empty(len(members), shape[1], rank)
        self.q.share_memory_()  # type: ignore[no-untyped-call]
        self._ready = False

    def _make_ready(self) -> None:
        """Make what is large, where the rounds run: before the fork a GPU must not be touched."""
        count, (rows, columns) = len(self.members), self._shape
        self._buffer = torch.zeros(count, rows, columns, device=self._device)
        self._total = torch.empty_like(self._buffer)
        # What is owed is the buffer less their product.
        self._left = torch.zeros(count, rows, self._rank, device=self._device)
        self._right = torch.zeros(count, self._rank, columns, device=self._device)
        self._ready = True

    @property
    def owed(self) -> torch.Tensor:
        """Error feedback: gradients that no round has applied yet, (k, n, m) in float32.

        Once rounds have begun it is what the next one reads, and can be written.
        """
        if not self._ready:
            return torch.zeros(len(self.members), *self._shape)
        self._buffer.baddbmm_(self._left, self._right, alpha=-1)
        # New ones: the step back may need the old.
        self._left, self._right = torch.zeros_like(self._left), torch.zeros_like(self._right)
        return self._buffer

    def begin(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Take a round's gradients, of any shape with as many elements; return P (k, n, r)."""
        if not self._ready:
            self._make_ready()
        matrices = [
            gradient.to(self._device, torch.float32).reshape(self._shape).contiguous()
            for gradient in gradients
        ]
        if self._passes is None:
            torch.add(self._buffer, torch.stack(matrices), out=self._total)
            self._total.baddbmm_(self._left, self._right, alpha=-1)
            return self.project(self.q)
        q = _transposed(self.q)
        p = torch.empty(len(q), q.shape[1], self._shape[0])
        dense = (self._buffer, matrices, self._total)
        for work in zip(*dense, self._left, self._right, q, p, strict=True):
            self._passes.begin(*work)
        return _transposed(p)

    def project(self, q: torch.Tensor) -> torch.Tensor:
        """Return P (k, n, r) for another Q: the matrices times Q."""
        p = torch.bmm(_transposed(q).to(self._device), self._total.transpose(1, 2))
        return _transposed(p.cpu())

    def backproject(self, p: torch.Tensor) -> torch.Tensor:
        """Return Q (k, m, r): the transposed matrices times P."""
        rows = _transposed(p)
        if self._passes is None:
            return _transposed(torch.bmm(rows.to(self._device), self._total).cpu())
        q = torch.empty(*rows.shape[:2], self._shape[1])
        for work in zip(rows, self._total, q, strict=True):
            self._passes.backproject(*work)
        return _transposed(q)

    def commit(self, gradients: Sequence[torch.Tensor], p: torch.Tensor, q: torch.Tensor) -> None:
        """Replace gradients by what the factors stand for, and owe what they miss."""
        columns = _transposed(q)
        sizes = columns.abs().amax(2)
        finite = (sizes.sum(1) + p.sum((1, 2))).isfinite()
        found = (sizes > 0) & finite[:, None]  # columns of Q that stand for something
        left, right = p.to(self._device), columns.to(self._device)
        for at, (gradient, total, good) in enumerate(
            zip(gradients, self._total, finite.tolist(), strict=True)
        ):
            if good and gradient.dtype == total.dtype and gradient.is_contiguous():
                matrix = gradient.view(total.shape)
                if matrix.device == total.device:
                    (self._passes or TorchPasses).multiply(left[at], right[at], matrix)
                else:
                    matrix.copy_(left[at] @ right[at])
                continue
            if good:
                gradient.copy_((left[at] @ right[at]).reshape(gradient.shape))
                # What rounding took away is owed too.
                total.sub_(gradient.to(total.device, total.dtype).reshape(total.shape))
            else:  # somebody's gradient blew up: that is told, and not remembered
                gradient.fill_(torch.nan)
                total.copy_(self.owed[at])
            left[at], right[at] = 0.0, 0.0  # nothing is left to subtract
        self._before = (self._left, self._right, self.q.clone())
        self._left, self._right = left, right
        self._buffer, self._total = self._total, self._buffer
        # A column of zeros would stay one for ever: what found nothing now may find it next time.
        self.q.copy_(q if found.all() else torch.where(found[:, None], q, self.q))

    def undo(self) -> None:
        """Take back the last commit, except what it made of the gradients."""
        self._buffer, self._total = self._total, self._buffer
        self._left, self._right, q = self._before
        self.q.copy_(q)


class Factors:
    """All gradients that are factorised.

    Args:
        shapes: Their shapes.
        rank: Columns of the factors, if a matrix has as many.
        seed: What the first Q is drawn from, the same for all peers.
        orthogonalise: Makes the columns of matrices (k, n, r) orthonormal.
        device: Where the dense matrices are kept and multiplied.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        rank: int,
        *,
        seed: int,
        orthogonalise: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._orthogonalise = orthogonalise
        dims = [matrix_dims(shape) for shape in shapes]
        ordered = sorted(range(len(dims)), key=lambda at: (dims[at], at))
        self._stacks = [
            Stack(tuple(members), (rows, columns), factor_rank((rows, columns), rank), device)
            for (rows, columns), members in groupby(ordered, key=lambda at: dims[at])
        ]
        generator = torch.Generator().manual_seed(seed)
        for q in self.qs:
            q.normal_(generator=generator)

    @property
    def qs(self) -> Tensors:
        """What the next round begins with, by matrix, (m, r) each."""
        return self.unstacked([stack.q for stack in self._stacks])

    @property
    def owed(self) -> Tensors:
        """Error feedback, in the shapes of the gradients."""
        return self._owed()

    @torch.no_grad()
    def _owed(self) -> Tensors:
        pairs = zip(self.unstacked([s.owed for s in self._stacks]), self._shapes, strict=True)
        return [owed.view(shape) for owed, shape in pairs]

    def unstacked(self, stacked: Tensors) -> Tensors:
        """Return the matrices of all stacks in the order of their gradients, as views."""
        found = {
            at: matrix
            for stack, matrices in zip(self._stacks, stacked, strict=True)
            for at, matrix in zip(stack.members, matrices, strict=True)
        }
        return [found[at] for at in range(len(found))]

    def _of(self, stack: Stack, gradients: Sequence[torch.Tensor]) -> Tensors:
        return [gradients[at] for at in stack.members]

    @torch.no_grad()
    def begin(self, gradients: Sequence[torch.Tensor]) -> Tensors:
        """Take a round's gradients; return P of every stack."""
        return [stack.begin(self._of(stack, gradients)) for stack in self._stacks]

    @torch.no_grad()
    def project(self, qs: Tensors) -> Tensors:
        """Return P of every stack for another Q, in a further iteration."""
        return [stack.project(q) for stack, q in zip(self._stacks, qs, strict=True)]

    @torch.no_grad()
    def backproject(self, ps: Tensors) -> Tensors:
        """Make every P orthonormal, in place, and return the Q that goes with it."""
        for alike in _alike(ps):
            done = self._orthogonalise(torch.cat(alike))
            for p, new in zip(alike, torch.split(done, [len(p) for p in alike]), strict=True):
                p.copy_(new)
        return self._backproject(ps)

    @torch.no_grad()
    def _backproject(self, ps: Tensors) -> Tensors:
        # Backwards: what the projection read last is still near.
        pairs = zip(reversed(self._stacks), reversed(ps), strict=True)
        return [stack.backproject(p) for stack, p in pairs][::-1]

    @torch.no_grad()
    def commit(
        self, gradients: Sequence[torch.Tensor], ps: Tensors, qs: Tensors, *, owing: bool = True
    ) -> None:
        """Replace gradients by what the factors stand for, and owe what they miss.

        A matrix whose factors are not finite becomes NaN, as it would without PowerSGD; what is
        owed for it and its Q stay, so that the next round is not the worse for it.

        Args:
            gradients: Those of the round.
            ps: What the group's P are.
            qs: What the group's Q are.
            owing: False for gradients that are not in the factors: what was owed before stays.
        """
        for stack, p, q in zip(self._stacks, ps, qs, strict=True):
            before = None if owing else stack.owed.clone()
            stack.commit(self._of(stack, gradients), p, q)
            if before is not None:
                stack.owed.copy_(before)

    @torch.no_grad()
    def undo(self) -> None:
        """Owe again what was owed before the last commit, and begin with the same Q."""
        for stack in self._stacks:
            stack.undo()

    def close(self) -> None:
        """End what works for the factors: here, nothing does."""


def _alike(ps: Tensors) -> list[Tensors]:
    """Return stacks of as many rows and columns together."""
    ordered = sorted(ps, key=lambda p: p.shape[1:])
    return [list(group) for _, group in groupby(ordered, key=lambda p: p.shape[1:])]


def _transposed(matrices: torch.Tensor) -> torch.Tensor:
    """Return a transposed copy of factors in host memory; torch needs eight times as long."""
    return torch.from_numpy(np.ascontiguousarray(matrices.numpy().swapaxes(1, 2)))
