"""PowerSGD's arithmetic on a GPU, computed by the trainer's process for the averager's.

An averager runs its rounds in a process that was forked from the trainer's, and a fork cannot use
the GPU that its parent uses. It therefore sends requests over a pipe, and a thread of the trainer's
process serves them. The dense matrices stay on the GPU. The factors, which are sent to other peers
anyway, pass through the pipe. Gradients are in memory that both processes share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rayhive.compression.powersgd.factors import Factors, Tensors

#: Longest wait for the trainer's process [s], which runs kernels meanwhile, not batches.
PATIENCE_S = 60.0
#: Longest wait for the serving thread to end [s].
GOODBYE_S = 5.0
#: Requests that read or write the gradients of a round.
_WITH_GRADIENTS = ("begin", "commit")


class NoFactors(RuntimeError):
    """The process that computes the factors failed, or has ended."""


class ServedFactors(Factors):
    """Factors computed by the process that made them, for this process and its forks.

    Requests are served one at a time, in the order of the rounds.

    Args:
        gradients: All factorised gradients, in memory that the processes share. The arguments of
            :meth:`begin` and :meth:`commit` must be the same tensors.
        args: As those of :class:`rayhive.compression.powersgd.factors.Factors`.
        device: Device that keeps and multiplies the dense matrices.
        kwargs: As those of ``Factors``.

    Raises:
        NoFactors: Raised by every method. Either the serving process failed, and nothing has
            changed; or it did not answer, and gets no further requests.
    """

    def __init__(
        self, gradients: Sequence[torch.Tensor], *args: Any, device: torch.device, **kwargs: Any
    ) -> None:
        super().__init__(gradients, *args, device=device, **kwargs)
        self._gradients, self._device = gradients, device
        self._inner, self._outer = multiprocessing.Pipe()
        self._server = threading.Thread(target=self._serve, name="powersgd", daemon=True)
        self._server.start()

    def begin(self, gradients: Sequence[torch.Tensor], *, weight: float = 1.0) -> Tensors:
        """Add the feedback to a round's gradients; return P of every stack."""
        return self._tensors("begin", weight=weight)

    def project(self, qs: Tensors) -> Tensors:
        """Return P of every stack for another Q, in a further iteration."""
        return self._tensors("project", qs)

    def _backproject(self, ps: Tensors) -> Tensors:
        return self._tensors("_backproject", ps)

    def commit(
        self,
        gradients: Sequence[torch.Tensor],
        ps: Tensors,
        qs: Tensors,
        owed: Tensors | None = None,
    ) -> None:
        """Replace gradients by the product of the factors; keep the error of the peer's own."""
        self._ask("commit", ps, qs, *(() if owed is None else (owed,)))

    def undo(self) -> None:
        """Restore the error feedback and the Q from before the last commit."""
        self._ask("undo")

    @property
    def error_feedback(self) -> Tensors:
        """Error feedback, in the shapes of the gradients."""
        return self._tensors("error_feedback")

    def close(self) -> None:
        """End the serving thread."""
        with (
            contextlib.suppress(OSError),
            self._outer,
            socket.socket(fileno=os.dup(self._outer.fileno())) as end,
        ):
            # Both processes hold both ends, so closing one end has no effect on the other.
            end.shutdown(socket.SHUT_RDWR)
        self._server.join(GOODBYE_S)

    def _tensors(self, name: str, *arguments: Tensors, **options: Any) -> Tensors:
        return [torch.from_numpy(array) for array in self._ask(name, *arguments, **options)]

    def _ask(self, name: str, *arguments: Tensors, **options: Any) -> Any:
        try:
            self._outer.send((name, [_arrays(tensors) for tensors in arguments], options))
            if not self._outer.poll(PATIENCE_S):
                self.close()  # a late answer must not be taken for the next request's
                raise NoFactors(f"{name} took the trainer's process more than {PATIENCE_S:g} s")
            answer, error = self._outer.recv()
        except (EOFError, OSError) as gone:
            raise NoFactors(f"the trainer's process does not answer: {gone!r}") from gone
        if error is not None:
            raise NoFactors(error)
        return answer

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError), self._inner, contextlib.ExitStack() as stack:
            request = self._inner.recv()
            if self._device.type == "cuda":  # not before the fork, and beside the trainer's kernels
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
            while True:
                self._inner.send(self._answer(*request))
                request = self._inner.recv()

    def _answer(
        self, name: str, arguments: list[list[np.ndarray]], options: dict[str, Any]
    ) -> tuple[list[np.ndarray] | None, str | None]:
        tensors: list[Sequence[torch.Tensor]] = [
            [torch.from_numpy(array) for array in arrays] for arrays in arguments
        ]
        try:
            if name in _WITH_GRADIENTS:
                tensors.insert(0, self._gradients)
            found = getattr(super(), name)
            result = found(*tensors, **options) if callable(found) else found
        except Exception as error:
            return None, f"{name}: {error!r}"
        return None if result is None else _arrays(result), None


def _arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return tensors as arrays, which are sent by value; torch would send handles."""
    return [tensor.cpu().numpy() for tensor in tensors]
