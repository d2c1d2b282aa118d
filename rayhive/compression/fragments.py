"""Division of tensors into fragments, of which each round averages one."""

from __future__ import annotations

from collections.abc import Sequence


def split(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the tensors of each fragment.

    The largest tensor goes to the smallest fragment so far, and so on. Tensors are not cut.

    Args:
        sizes: Elements of each tensor.
        fragments: Number of fragments, at most that of the tensors.

    Raises:
        ValueError: There are more fragments than tensors.
    """
    if not 1 <= fragments <= len(sizes):
        raise ValueError(f"{fragments} fragments of {len(sizes)} tensors")
    members: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = min(range(fragments), key=lambda f: (filled[f], f))
        members[smallest].append(index)
        filled[smallest] += sizes[index]
    return tuple(tuple(sorted(each)) for each in members)
