"""Cutting of tensors into the parts of an all-reduce: which peer reduces what, and in what pieces.

All tensors of a round stand in one line. The line is cut at the borders of the reducers' shares,
wherever these fall, so that the shares are even also for a small model. Each share is cut into
*parts*, the messages of the all-reduce. A part holds one or more *segments*; each segment is a
stretch of one tensor and is encoded by itself, so that a codec's scale never spans two tensors.

Sizes are sizes after encoding. Nothing is read or allocated here: members of a group compute the
same partition from sizes alone, and a prediction computes it without any peer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rayhive.compression.shares import Shares, worthwhile

#: Version of this partition; members of a group with another version cannot use it.
PARTITION_VERSION = 4
#: Largest part [bytes].
LARGEST_PART = 2**19
#: Bytes that take as long as the fixed work of one part. A share of S bytes in parts of p bytes
#: takes about S + (S/p)·cost for all parts, and p more until the first averages come back;
#: p = √(S·cost) is the order of the best size.
PART_COST = 2**15
#: The parts of a share get smaller towards its end: a part is at most this fraction of what is left
#: of the share. A round ends when the last averages have arrived, and while these travel the links
#: have nothing else to carry.
TAPER = 2
#: Least size of a part [bytes]; what is left is one part if it is less than this number of them.
LEAST_PART, WHOLE = 2**13, 3
#: The front of a stretch joins a part if it is at least the part's largest size over this number.
SLIVER = 8
#: Least share that is worth a reducer, and with it messages between it and all others [bytes].
LEAST_SHARE = 2**12
#: A border moves to the end of a tensor that is closer than a share divided by this number: a cut
#: would leave a sliver.
SNAP = 100
#: Elements of the two parts whose sizes determine the price of a tensor.
PROBES = (512, 1024)
#: Number of grains in a byte. Sizes are counted in grains, so that all arithmetic is exact.
GRAINS = PROBES[1] - PROBES[0]


@dataclass(frozen=True)
class Price:
    """Encoded size of a segment: ``fixed + per_element · elements`` [grains].

    Attributes:
        fixed: Size of a segment besides its elements.
        per_element: Size of an element; rounded up for blocks that do not divide a probe.
        block: Elements of a codec's block, counted from the start of the tensor. No cut divides
            a block, so that an encoding does not depend on the cuts.
    """

    fixed: int
    per_element: int
    block: int = 1

    @classmethod
    def of(cls, size: Callable[[int], int], block: int = 1) -> Price:
        """Return the price from a function that gives the bytes of a segment of n elements."""
        probe = block * -(-PROBES[0] // block)
        few, many = size(probe), size(2 * probe)
        per_element = max(-(-(many - few) * GRAINS // probe), 1)
        return cls(max(0, few * GRAINS - per_element * probe), per_element, block)

    def __call__(self, elements: int) -> int:
        """Return the size of a segment; nothing is sent for no elements."""
        return self.fixed + self.per_element * elements if elements else 0

    def elements(self, size: int) -> int:
        """Return the number of elements of the largest segment of at most this size."""
        most = max(0, (size - self.fixed) // self.per_element)
        return most - most % self.block


@dataclass(frozen=True)
class Segment:
    """Stretch of one tensor that is encoded by itself.

    Attributes:
        tensor: Index of the tensor.
        start: First element.
        stop: Element after the last one.
    """

    tensor: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


#: Segments of one message, in the order of the tensors.
Part = tuple[Segment, ...]
#: Parts of every member of a group, in order; none for a member that does not reduce.
Partition = tuple[tuple[Part, ...], ...]


@lru_cache(maxsize=64)
def partition(sizes: tuple[int, ...], prices: tuple[Price, ...], shares: Shares) -> Partition:
    """Return the parts that each member of a group reduces.

    Stretches of the line are given to the members in order of rising shares, so that the sizes of
    the parts do not depend on the order of equal members.

    Args:
        sizes: Elements of each tensor.
        prices: Price of each tensor.
        shares: Share of each member; 0 for one that does not reduce.
    """
    total = sum(price(size) for price, size in zip(prices, sizes, strict=True))
    shares = worthwhile(shares, total, LEAST_SHARE * GRAINS)
    order = sorted(range(len(shares)), key=lambda at: (shares[at], at))
    reducers = [at for at in order if shares[at]]
    line = _Line(sizes, prices, _largest_part(total // len(reducers), prices))
    parts: list[tuple[Part, ...]] = [()] * len(shares)
    for place, at in enumerate(reducers):
        later = reducers[place + 1 :]
        left = sum((shares[other] for other in later), shares[at])
        parts[at] = tuple(line.parts(line.take(shares[at] / left, cuts=len(later))))
    return tuple(parts)


def _largest_part(share: int, prices: Sequence[Price]) -> int:
    """Return the size of a part, from the size of a fair share [grains]."""
    fixed = max((price.fixed for price in prices), default=0)
    best = math.isqrt(share * (PART_COST * GRAINS + fixed))
    return max(2 * fixed, min(best, LARGEST_PART * GRAINS))


class _Line:
    """The stretches of tensors that no reducer has yet.

    Args:
        sizes: Elements of each tensor.
        prices: Price of each tensor.
        largest: Largest part [grains].
    """

    def __init__(self, sizes: Sequence[int], prices: Sequence[Price], largest: int) -> None:
        self._prices, self._largest = prices, largest
        fixed = max((price.fixed for price in prices), default=0)
        self._least = min(largest, max(LEAST_PART * GRAINS, 8 * fixed))
        #: Elements of the longest segment of each tensor.
        self._longest = [max(price.block, price.elements(largest)) for price in prices]
        self._rest = deque(Segment(at, 0, size) for at, size in enumerate(sizes) if size)
        self._left = sum(map(self._size, self._rest))

    def _count(self, stretch: Segment) -> int:
        """Return the number of segments into which a stretch is cut."""
        return -(-len(stretch) // self._longest[stretch.tensor])

    def _size(self, stretch: Segment) -> int:
        """Return the size of a stretch that is cut into segments [grains]."""
        price = self._prices[stretch.tensor]
        return price.fixed * self._count(stretch) + price.per_element * len(stretch)

    def _elements(self, tensor: int, size: int) -> int:
        """Return the elements of the largest stretch of at most this size [grains]."""
        price, longest = self._prices[tensor], self._longest[tensor]
        whole, rest = divmod(size, price(longest))
        return whole * longest + price.elements(rest)

    def take(self, share: Fraction, cuts: int) -> list[Segment]:
        """Remove the share of the next reducer; return its stretches.

        Args:
            share: Its share of the rest of the line.
            cuts: Number of reducers behind it; the border before each of them may cut a tensor.
        """
        if not cuts:
            taken = list(self._rest)
            self._rest.clear()
            return taken
        taken = []
        cut = max((self._prices[stretch.tensor].fixed for stretch in self._rest), default=0)
        left = int((self._left + cut * cuts) * share)
        snap = left // SNAP
        while self._rest and left > 0:
            stretch = self._rest.popleft()
            size = self._size(stretch)
            self._left -= size
            if size > left + snap:
                stretch = self._cut(stretch, left, snap)
                if not len(stretch):
                    break
            taken.append(stretch)
            left -= self._size(stretch)
        return taken

    def _cut(self, stretch: Segment, size: int, least: int) -> Segment:
        """Return the front of a stretch, and put the rest back.

        The front is empty where it would be a sliver. A stretch too small to be cut goes to the
        reducer that needs the larger half of it.
        """
        front = self._elements(stretch.tensor, size) if size > least else 0
        if size > least and not front and 2 * size > self._size(stretch):
            return stretch
        border = stretch.start + front
        rest = Segment(stretch.tensor, border, stretch.stop)
        self._rest.appendleft(rest)
        self._left += self._size(rest)
        return Segment(stretch.tensor, stretch.start, border)

    def parts(self, share: Sequence[Segment]) -> Iterator[Part]:
        """Cut a share into parts; each is one message, and short neighbours are in one part."""
        rest = deque(share)
        left = sum(self._prices[each.tensor](len(each)) for each in rest)
        while rest:
            part, cost = self._part(rest, self._limit(left))
            left -= cost
            yield part

    def _limit(self, left: int) -> int:
        """Return the size of the next part, when so much is left of a share [grains]."""
        if left < WHOLE * self._least:
            return max(self._least, min(left, self._largest))
        return min(self._largest, max(self._least, left // TAPER))

    def _part(self, rest: deque[Segment], limit: int) -> tuple[Part, int]:
        """Remove a part from the front of a share.

        Args:
            rest: What is left of the share.
            limit: Largest size of the part [grains].

        Returns:
            The part, and by how much less the rest of the share takes [grains].
        """
        part: list[Segment] = []
        room, cost = limit, 0
        while rest:
            stretch = rest[0]
            price = self._prices[stretch.tensor]
            size = price(len(stretch))
            if size > room:
                front = price.elements(room)
                if part and price(front) * SLIVER < limit:
                    break
                border = min(stretch.start + max(price.block, front), stretch.stop)
                rest.popleft()
                if border < stretch.stop:
                    rest.appendleft(Segment(stretch.tensor, border, stretch.stop))
                    cost -= price.fixed  # the rest has a head of its own
                stretch = Segment(stretch.tensor, stretch.start, border)
                size, room = price(len(stretch)), 0
            else:
                rest.popleft()
                room -= size
            part.append(stretch)
            cost += size
            if not room:
                break
        return tuple(part), cost
