"""PowerSGD's arithmetic for one peer: error feedback, factors, and the approximated gradients.

The error feedback of a peer is the error of its own factors: its update less P times its own Q,
from before Q is averaged. (The error of the group's factors would also contain the difference
between the peer's gradient and the group's. That difference accumulates, and cancels between peers
only while their weights are equal and no peer leaves.) The factors enter the average with the
weight of the round, which is the number of samples of the peer. Their error has the same weight and
therefore counts as a sum over samples: in a round of another weight it is scaled by the ratio of
the two weights.

A round is bound by memory: its cost is the number of times that a dense array is read or written.
The error feedback is kept as a dense buffer less a product of factors; the product is subtracted
when the next round reads the buffer anyway. The sum of feedback and gradient goes into a second
buffer, and a commit only swaps the two buffers. A round therefore changes nothing until
:meth:`Factors.commit`. It can be undone until the next one, for a caller that learns late that its
round did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch

from rayhive.compression.powersgd import kernels
from rayhive.compression.powersgd.kernels import host_passes
from rayhive.compression.powersgd.shapes import factor_rank, matrix_dims

Tensors = list[torch.Tensor]


class Stack:
    """Matrices of one shape, multiplied together.

    Args:
        members: Positions of the matrices among all factorised gradients.
        shape: Rows n and columns m.
        rank: Columns of the factors.
        device: Device that multiplies; the factors themselves are always in host memory.

    Attributes:
        q: Q that the next round begins with, (k, m, r), shared between the processes of a peer.
    """

    def __init__(
        self, members: tuple[int, ...], shape: tuple[int, int], rank: int, device: torch.device
    ) -> None:
        self.members, self._shape, self._rank, self._device = members, shape, rank, device
        # On a GPU all matrices at once: there, every operation is slow to start.
        self._passes = host_passes() if device.type == "cpu" else None
        self.q = torch.empty(len(members), shape[1], rank, dtype=torch.float32)
        self.q.share_memory_()  # type: ignore[no-untyped-call]
        self._ready = False

    def _make_ready(self) -> None:
        """Allocate the dense buffers, after the fork: before it a GPU must not be used."""
        count, (rows, columns) = len(self.members), self._shape
        zeros = partial(torch.zeros, device=self._device, dtype=torch.float32)
        self._buffer = zeros(count, rows, columns)
        self._total = torch.empty_like(self._buffer)
        # The error feedback is the buffer less their product.
        self._left = zeros(count, rows, self._rank)
        self._right = zeros(count, self._rank, columns)
        self._own = self._right  # the Q of this peer alone, transposed
        self._scale = 1.0
        self._ready = True

    @property
    def error_feedback(self) -> torch.Tensor:
        """Part of past updates that this peer's factors missed, (k, n, m).

        In float32, per sample of the last round that this peer was in. After the first round it is
        the memory that the next round reads, and it can be written.
        """
        if not self._ready:
            return torch.zeros(len(self.members), *self._shape)
        self._write_out()
        return self._buffer

    def _write_out(self) -> None:
        """Subtract the product of factors from the buffer, so that the buffer is the feedback."""
        self._buffer.baddbmm_(self._left, self._right, alpha=-1)
        # New tensors: undo may need the old ones.
        self._left, self._right = torch.zeros_like(self._left), torch.zeros_like(self._right)

    def begin(self, gradients: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Add the feedback, times ``scale``, to a round's gradients; return P (k, n, r).

        The gradients may have any shape with as many elements as the matrices.
        """
        if not self._ready:
            self._make_ready()
        self._scale = scale
        matrices = [
            gradient.to(self._device, torch.float32).reshape(self._shape).contiguous()
            for gradient in gradients
        ]
        if self._passes is None:
            torch.add(torch.stack(matrices), self._buffer, alpha=scale, out=self._total)
            self._total.baddbmm_(self._left, self._right, alpha=-scale)
            return self.project(self.q)
        q = _of_unit_length(_transposed(self.q))
        p = torch.empty(len(q), q.shape[1], self._shape[0], dtype=torch.float32)
        dense = (self._buffer, matrices, self._total)
        for work in zip(*dense, scale * self._left, self._right, q, p, strict=True):
            self._passes.begin(scale, *work)
        return _transposed(p)

    def project(self, q: torch.Tensor) -> torch.Tensor:
        """Return P (k, n, r) for another Q: the matrices times Q."""
        rows = _of_unit_length(_transposed(q))
        p = torch.bmm(rows.to(self._device), self._total.transpose(1, 2))
        return _transposed(p.cpu())

    def backproject(self, p: torch.Tensor) -> torch.Tensor:
        """Return Q (k, m, r): the transposed matrices times P."""
        rows = _transposed(p)
        if self._passes is None:
            self._own = torch.bmm(rows.to(self._device), self._total)
            return _transposed(self._own.cpu())
        self._own = torch.empty(*rows.shape[:2], self._shape[1], dtype=torch.float32)
        for work in zip(rows, self._total, self._own, strict=True):
            self._passes.backproject(*work)
        return _transposed(self._own)

    def commit(
        self,
        gradients: Sequence[torch.Tensor],
        p: torch.Tensor,
        q: torch.Tensor,
        *,
        contributes: bool,
        owed: torch.Tensor | None = None,
    ) -> None:
        """Replace gradients by the product of the factors; keep the error of the peer's own.

        Args:
            gradients: Gradients of the round.
            p: P of the last :meth:`backproject`.
            q: The averaged Q.
            contributes: False if this peer's factors are not in the average: the feedback stays.
            owed: Errors of Q that this peer owes, per sample as the feedback, (k, m, r): its
                product with P is added to the feedback.
        """
        columns_owed = None if owed is None else _transposed(owed).to(self._device)
        columns = _transposed(q)
        sizes = columns.abs().amax(2)
        finite = (sizes.sum(1) + p.sum((1, 2))).isfinite()
        found = (sizes > 0) & finite[:, None]  # columns of Q that are not zero
        blown_up = (~finite).nonzero().flatten().tolist()
        left, right = p.to(self._device), columns.to(self._device)
        for at, gradient in enumerate(gradients):
            if at in blown_up:  # visible to the trainer, and without effect on later rounds
                gradient.fill_(torch.nan)
            else:
                self._apply(at, gradient, left[at], right[at])
        if blown_up or not contributes:
            self._write_out()  # it is read below, or stays
        self._before = (self._buffer, self._total, self._left, self._right, self.q.clone())
        if columns_owed is not None:
            columns_owed[~columns_owed.isfinite().all(2).all(1)] = 0.0
            columns_owed[blown_up] = 0.0
            if contributes:
                self._own = self._own - columns_owed
            else:  # the product was written out above, and undo needs the buffer as it is
                self._left, self._right = left.nan_to_num(0.0, 0.0, 0.0), -columns_owed
                self._total.copy_(self._buffer)
                self._buffer, self._total = self._total, self._buffer
        if contributes:
            for at in blown_up:
                torch.mul(self._buffer[at], self._scale, out=self._total[at])
                left[at], self._own[at] = 0.0, 0.0  # no product to subtract
            self._left, self._right = left, self._own
            self._buffer, self._total = self._total, self._buffer
        # A column of zeros would stay zero for ever, so it keeps its former value.
        self.q.copy_(q if found.all() else torch.where(found[:, None], q, self.q))

    def _apply(
        self, at: int, gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """Replace one gradient by the product of its factors."""
        total = self._total[at]
        if gradient.dtype == total.dtype and gradient.is_contiguous():
            matrix = gradient.view(total.shape)
            if matrix.device == total.device:
                (self._passes or kernels).multiply(left, right, matrix)
            else:
                matrix.copy_(left @ right)
            return
        product = left @ right
        gradient.copy_(product.reshape(gradient.shape))
        if gradient.dtype != total.dtype:  # rounding is part of the error as well
            total.add_(product).sub_(gradient.to(total.device, total.dtype).reshape(total.shape))

    def undo(self) -> None:
        """Take back the last commit, except for the gradients."""
        self._buffer, self._total, self._left, self._right, q = self._before
        self.q.copy_(q)


class Factors:
    """Factors of all factorised gradients, in stacks of equal shape.

    Args:
        gradients: Tensors in the shapes of the gradients of every round.
        rank: Columns of the factors, cut to the smaller side of a matrix.
        seed: Seed of the first Q, equal for all peers.
        orthogonalise: Makes the columns of matrices (k, n, r) orthonormal.
        device: Device that keeps and multiplies the dense matrices.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        rank: int,
        *,
        seed: int,
        orthogonalise: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._shapes = [gradient.shape for gradient in gradients]
        self._orthogonalise = orthogonalise
        dims = [matrix_dims(shape) for shape in self._shapes]
        ordered = sorted(range(len(dims)), key=lambda at: (dims[at], at))
        self._stacks = [
            Stack(tuple(members), (rows, columns), factor_rank((rows, columns), rank), device)
            for (rows, columns), members in groupby(ordered, key=lambda at: dims[at])
        ]
        self._weight = self._former_weight = 1.0  # of the feedback, now and before the last commit
        self._entering = 1.0  # of the round under way
        generator = torch.Generator().manual_seed(seed)
        for q in self.qs:
            q.normal_(generator=generator)

    @property
    def qs(self) -> Tensors:
        """Q that the next round begins with, by matrix, (m, r) each."""
        return self.unstacked([stack.q for stack in self._stacks])

    @property
    @torch.no_grad()
    def error_feedback(self) -> Tensors:
        """Error feedback, in the shapes of the gradients."""
        feedback = self.unstacked([stack.error_feedback for stack in self._stacks])
        return [each.view(shape) for each, shape in zip(feedback, self._shapes, strict=True)]

    @property
    def debt(self) -> Tensors:
        """Error feedback as sums over samples, in the shapes of the gradients."""
        return [each * self._weight for each in self.error_feedback]

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
    def begin(self, gradients: Sequence[torch.Tensor], *, weight: float = 1.0) -> Tensors:
        """Add the feedback to a round's gradients; return P of every stack.

        Args:
            gradients: Means over the samples of this peer.
            weight: Weight of this peer in the averages of the round, usually its number of
                samples. With 0 its factors are not in the averages, and its error feedback
                neither enters the round nor changes.
        """
        self._entering = weight
        scale = self._weight / weight if weight else 0.0
        return [stack.begin(self._of(stack, gradients), scale) for stack in self._stacks]

    @torch.no_grad()
    def project(self, qs: Tensors) -> Tensors:
        """Return P of every stack for another Q, in a further iteration."""
        return [stack.project(q) for stack, q in zip(self._stacks, qs, strict=True)]

    @torch.no_grad()
    def backproject(self, ps: Tensors) -> Tensors:
        """Make every P orthonormal, in place, and return the Q that belongs to it."""
        for alike in _alike(ps):
            done = self._orthogonalise(torch.cat(alike))
            for p, new in zip(alike, torch.split(done, [len(p) for p in alike]), strict=True):
                p.copy_(new)
        return self._backproject(ps)

    @torch.no_grad()
    def _backproject(self, ps: Tensors) -> Tensors:
        # Backwards: the matrix that the projection read last is still in a cache.
        pairs = zip(reversed(self._stacks), reversed(ps), strict=True)
        return [stack.backproject(p) for stack, p in pairs][::-1]

    @torch.no_grad()
    def commit(
        self,
        gradients: Sequence[torch.Tensor],
        ps: Tensors,
        qs: Tensors,
        owed: Tensors | None = None,
    ) -> None:
        """Replace gradients by the product of the factors; keep the error of the peer's own.

        A matrix whose factors are not finite becomes NaN, as it would without PowerSGD. Its error
        feedback and its Q stay, so that the next round is unaffected.

        Args:
            gradients: Gradients of the round.
            ps: P of the last :meth:`backproject`.
            qs: The averaged Q.
            owed: Errors of the codec in Q that this peer owes, by matrix, as sums over samples.
        """
        contributes = self._entering > 0
        weight = self._entering if contributes else self._weight
        for stack, p, q in zip(self._stacks, ps, qs, strict=True):
            errors = None if owed is None else torch.stack(self._of(stack, owed)) / weight
            stack.commit(self._of(stack, gradients), p, q, contributes=contributes, owed=errors)
        self._former_weight = self._weight
        if contributes:
            self._weight = self._entering

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the error feedback and the Q from before the last commit."""
        for stack in self._stacks:
            stack.undo()
        self._weight = self._former_weight

    def close(self) -> None:
        """Release threads and pipes; here there are none."""


def _alike(ps: Tensors) -> list[Tensors]:
    """Return the stacks grouped by rows and columns of their matrices."""
    ordered = sorted(ps, key=lambda p: p.shape[1:])
    return [list(group) for _, group in groupby(ordered, key=lambda p: p.shape[1:])]


def _of_unit_length(columns: torch.Tensor) -> torch.Tensor:
    """Return columns of Q, as rows (k, r, m), with lengths between 1/2 and 1.

    Q is as long as the matrix, so P would be as long as its square, and a small one would be lost
    in half precision. P is made orthonormal, so its length does not matter. Powers of two leave all
    bits of P but its exponents as they are.
    """
    lengths = torch.linalg.vector_norm(columns, dim=2, keepdim=True, dtype=torch.float64)
    exponents = torch.frexp(lengths).exponent.clamp(-126, 126)
    return torch.ldexp(columns, -exponents.to(columns.dtype))


def _transposed(matrices: torch.Tensor) -> torch.Tensor:
    """Return a transposed copy of factors in host memory; torch needs eight times as long."""
    return torch.from_numpy(np.array(matrices.numpy().swapaxes(1, 2), order="C"))
