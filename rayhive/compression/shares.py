"""Share of the elements that each peer of a group reduces, from the rates of the links.

Exact arithmetic: every member computes the shares by itself, and all must get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Shares = tuple[Fraction, ...]


def reducer_shares(rates: Sequence[float | None]) -> Shares:
    """Return the shares with which the slowest link of an all-reduce is done first.

    Of N peers, one that reduces the share x of a payload V sends V(1 - x) as a sender and
    (N - 1)xV as a reducer, in all V(1 + (N - 2)x), and receives as much. The longest time
    V(1 + (N - 2)xᵢ)/bᵢ over all peers is smallest where it is equal for all peers that reduce:
    1 + (N - 2)xᵢ = t·bᵢ. A peer whose link is too slow for this has no share. Two peers send V
    each whatever the shares, and get equal ones.

    Args:
        rates: Rate of each peer's link, in any unit; 0 for a peer that cannot reduce, None for a
            rate that is not known, which counts as the mean of the known ones.

    Raises:
        ValueError: A rate is negative, or no peer can reduce.
    """
    given = [Fraction(rate) for rate in rates if rate]
    usual = sum(given, Fraction(0)) / len(given) if given else Fraction(1)
    exact = [usual if rate is None else Fraction(rate) for rate in rates]
    if min(exact, default=Fraction(0)) < 0 or not any(exact):
        raise ValueError(f"no peer of a group with links of {list(rates)} can reduce")
    others = len(exact) - 2
    if others < 1:
        able = sum(rate > 0 for rate in exact)
        return tuple(Fraction(int(rate > 0), able) for rate in exact)
    fastest = sorted((rate for rate in exact if rate), reverse=True)
    time, total = Fraction(0), Fraction(0)
    for count, rate in enumerate(fastest, start=1):
        if count > 1 and time * rate <= 1:  # it would have no share left
            break
        total += rate
        time = (others + count) / total
    return tuple(max(Fraction(0), (time * rate - 1) / others) for rate in exact)


def worthwhile(shares: Shares, size: int, least: int) -> Shares:
    """Return shares without those that are too small to be worth a reducer.

    As many peers reduce as there are times ``least`` in ``size``, those with the largest shares,
    the first of equals first; at least one peer reduces.

    Args:
        shares: Shares that add up to 1.
        size: Size of what is shared.
        least: Least size per reducer, in the unit of ``size``.
    """
    most = max(1, size // least) if least > 0 else len(shares)
    order = sorted(range(len(shares)), key=lambda at: (-shares[at], at))
    kept = {at for at in order[:most] if shares[at]}
    total = sum((shares[at] for at in kept), Fraction(0))
    return tuple(share / total if at in kept else Fraction(0) for at, share in enumerate(shares))
