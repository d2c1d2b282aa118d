"""Statistics of an inner optimizer, such as moments and counters of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def averageable(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the statistics whose average has a meaning, sorted.

    These are the floating-point tensors that every parameter has; none if some are quantised.
    """
    if are_quantised(optimizer):
        return ()
    names: set[str] | None = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors = ((name, t) for name, t in state.items() if isinstance(t, torch.Tensor))
            floating = {name for name, tensor in tensors if tensor.is_floating_point()}
            names = floating if names is None else names & floating
    return tuple(sorted(names or ()))


def are_quantised(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether statistics of an optimizer are quantised, so that no average has a meaning.

    These are as large as their parameter, and of no floating-point type; a scale belongs to each.
    """
    return any(
        value.numel() == parameter.numel() > 1 and not value.is_floating_point()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor)
    )


def statistics(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all tensors of an optimizer's state."""
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


@contextmanager
def kept_in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the tensors of an optimizer's state while another state is loaded in the body.

    ``load_state_dict`` replaces them; an averager's process may share their memory. The present
    tensors get the loaded values.
    """
    before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    yield
    with torch.no_grad():
        for parameter, values in optimizer.state.items():
            for name, old in before.get(parameter, {}).items():
                new = values.get(name)
                if (
                    isinstance(old, torch.Tensor)
                    and isinstance(new, torch.Tensor)
                    and old.shape == new.shape
                ):
                    values[name] = old.copy_(new)
