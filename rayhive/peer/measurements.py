"""Measurements of a training: its time, its samples, and a sketch of its weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rayhive.events import Event, Progress, Weights

#: Numbers in a sketch.
BUCKETS = 64
#: Shortest interval between two ``progress`` events [s]. Of a peer that is killed, the last one
#: tells how many samples it had computed.
PROGRESS_S = 0.5


class TrainingClock:
    """Stopwatch that can be paused: evaluation belongs to the measurement, not to training."""

    def __init__(self) -> None:
        #: Seconds before the present stretch, and the beginning of that; None while it stands.
        self._counted: tuple[float, float | None] = 0.0, None

    def start(self, at: float = 0.0) -> None:
        """Start at a training time [s]."""
        self._counted = at, time.perf_counter()

    def seconds(self) -> float:
        """Return the training time [s]; 0 before the start."""
        before, since = self._counted
        return before if since is None else before + time.perf_counter() - since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the running clock in the body."""
        self._counted = self.seconds(), None
        try:
            yield
        finally:
            self._counted = self.seconds(), time.perf_counter()


class SampleCounts:
    """Counts of a peer's samples: computed = entered + lost + pending, at any time.

    Args:
        lost: Samples that an earlier process of the peer has computed.
    """

    def __init__(self, lost: int = 0) -> None:
        self.computed = self.lost = lost
        self.entered = 0

    @property
    def pending(self) -> int:
        """Samples that are in no round yet."""
        return self.computed - self.entered - self.lost

    def enter(self, samples: int, computed: int) -> int:
        """Note a round that used ``samples`` of ``computed`` ones; return how many were lost."""
        lost = computed - self.entered - self.lost - samples
        self.entered += samples
        self.lost += lost
        return lost

    def drop(self, kept: int = 0) -> int:
        """Note that all pending samples but ``kept`` were dropped; return how many were."""
        dropped = self.pending - kept
        self.lost += dropped
        return dropped


class BatchReports:
    """Losses of the batches of a round, and ``progress`` events between them.

    Args:
        emit: Destination of the events.
        samples: Counts of the peer's samples.
    """

    def __init__(self, emit: Callable[[Event], None], samples: SampleCounts) -> None:
        self._emit, self.samples = emit, samples
        self._losses: list[float] = []
        self._emitted = 0.0

    def end_batch(self, loss: float | None) -> None:
        """Keep the loss of a batch, if it has one, and report progress now and then."""
        if loss is not None:
            self._losses.append(loss)
        now = time.monotonic()
        if now - self._emitted >= PROGRESS_S:
            self._emitted = now
            self._emit(Progress(computed=self.samples.computed))

    def mean_loss(self) -> float | None:
        """Return the mean loss of the batches since the last call; None without one."""
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None


class WeightsSketch:
    """Function from the values of fixed tensors to their fingerprint.

    A count-sketch (Charikar, Chen and Farach-Colton, 2002, "Finding frequent items in data
    streams") adds every element, with a random sign, to one of a few buckets. It is linear, and the
    squared norm of a vector's sketch is an unbiased estimate of the vector's squared norm (relative
    standard deviation about ``sqrt(2 / buckets)``). So the sketches of two peers give the distance
    between their weights, and the weights are never sent. Equal weights have equal sketches, bit
    for bit.

    Args:
        tensors: The parameters; only their shapes and order matter.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        elements = sum(tensor.numel() for tensor in tensors)
        generator = torch.Generator().manual_seed(0)  # the same on all peers
        self._bucket = torch.randint(BUCKETS, (elements,), generator=generator, dtype=torch.int32)
        self._sign = torch.randint(2, (elements,), generator=generator, dtype=torch.int8) * 2 - 1

    @torch.no_grad()
    def __call__(self, round_: int, tensors: Sequence[torch.Tensor]) -> Weights:
        """Return the event with the norm and the sketch after a round."""
        flat = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in tensors])
        sketch = torch.zeros(BUCKETS, dtype=torch.float64)
        sketch.index_add_(0, self._bucket, flat * self._sign)
        norm = float(flat.norm())
        return Weights(round=round_, norm=norm, sketch=sketch.tolist(), finite=math.isfinite(norm))
