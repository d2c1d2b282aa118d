"""PowerSGD's arithmetic for one peer: error feedback, factors, and what a round makes of them.

A round reads everything and changes nothing until :meth:`Factors.commit`. The gradient plus what
is owed lies in a second dense buffer, in which the commit leaves what is owed next; the buffers
then change places. So the step back is still possible until the next round, for a caller that
hears late that its round did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

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
        owed: Error feedback: gradients that no round has applied yet, (k, n, m) in float32.
        q: What the next round begins with, (k, m, r), shared between the processes of a peer.
    """

    def __init__(
        self, members: tuple[int, ...], shape: tuple[int, int], rank: int, device: torch.device
    ) -> None:
        self.members = members
        self.owed = torch.zeros(len(self.members), *shape, device=device)
        self.q = torch.empty(len(self.members), shape[1], rank)
        self.q.share_memory_()  # type: ignore[no-untyped-call]
        self._q_before = torch.empty(self.q.shape)
        self._total: torch.Tensor | None = None  # made where the rounds run: it is large

    def begin(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take a round's gradients, of any shape with as many elements."""
        if self._total is None:
            self._total = torch.empty_like(self.owed)
        for gradient, owed, total in zip(gradients, self.owed, self._total, strict=True):
            torch.add(owed, gradient.to(owed.device).reshape(owed.shape), out=total)

    def project(self, q: torch.Tensor) -> torch.Tensor:
        """Return P (k, n, r): the matrices times Q."""
        assert self._total is not None
        return torch.bmm(self._total, q.to(self._total.device)).cpu()

    def backproject(self, p: torch.Tensor) -> torch.Tensor:
        """Return Q (k, m, r): the transposed matrices times P."""
        assert self._total is not None
        # Transposed both ways: a product with few rows is twice as fast as one with few columns.
        q = torch.bmm(p.to(self._total.device).transpose(1, 2), self._total)
        return q.transpose(1, 2).cpu().contiguous()

    def commit(self, gradients: Sequence[torch.Tensor], p: torch.Tensor, q: torch.Tensor) -> None:
        """Replace gradients by what the factors stand for, and owe what they miss."""
        assert self._total is not None
        self._q_before.copy_(self.q)
        sizes = torch.linalg.vector_norm(q, torch.inf, dim=1)
        finite = (sizes.sum(1) + p.sum((1, 2))).isfinite()
        # A column of zeros would stay one for ever: what found nothing now may find it next time.
        found = (sizes > 0) & finite[:, None]
        self.q.copy_(q if found.all() else torch.where(found[:, None], q, self.q))
        left, right = p.to(self.owed.device), q.to(self.owed.device).transpose(1, 2)
        self._total.baddbmm_(left, right, alpha=-1)
        for at, gradient in enumerate(gradients):
            total = self._total[at]
            if not finite[at]:  # somebody's gradient blew up: that is told, and not remembered
                gradient.fill_(torch.nan)
                total.copy_(self.owed[at])
            elif gradient.dtype == total.dtype and gradient.is_contiguous():
                _multiply(left[at], right[at], gradient.view(total.shape))
            else:
                exact = left[at] @ right[at]
                gradient.copy_(exact.reshape(gradient.shape))
                rounded = gradient.to(total.device, total.dtype).reshape(total.shape)
                total.add_(exact.sub_(rounded))  # what rounding took away is owed too
        self.owed, self._total = self._total, self.owed

    def undo(self) -> None:
        """Take back the last commit, except what it made of the gradients."""
        assert self._total is not None
        self.owed, self._total = self._total, self.owed
        self.q.copy_(self._q_before)


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
        projected = []
        for stack in self._stacks:
            stack.begin(self._of(stack, gradients))
            projected.append(stack.project(stack.q))
        return projected

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
        # Backwards: what the projection read last is still near.
        pairs = zip(reversed(self._stacks), reversed(ps), strict=True)
        return [stack.backproject(p) for stack, p in pairs][::-1]

    @torch.no_grad()
    def commit(self, gradients: Sequence[torch.Tensor], ps: Tensors, qs: Tensors) -> None:
        """Replace gradients by what the factors stand for, and owe what they miss.

        A matrix whose factors are not finite becomes NaN, as it would without PowerSGD; what is
        owed for it and its Q stay, so that the next round is not the worse for it.
        """
        for stack, p, q in zip(self._stacks, ps, qs, strict=True):
            stack.commit(self._of(stack, gradients), p, q)

    @torch.no_grad()
    def undo(self) -> None:
        """Owe again what was owed before the last commit, and begin with the same Q."""
        for stack in self._stacks:
            stack.undo()


def _alike(ps: Tensors) -> list[Tensors]:
    """Return stacks of as many rows and columns together."""
    ordered = sorted(ps, key=lambda p: p.shape[1:])
    return [list(group) for _, group in groupby(ordered, key=lambda p: p.shape[1:])]


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if left.device == out.device:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
