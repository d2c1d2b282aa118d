"""Places of parameters in the checkpoint of an optimizer.

The optimizer of a swarm has the trained parameters only. That of a plain trainer has frozen ones
as well, without statistics, if the module gave them to it. Checkpoints have the places of the
latter, so that both can load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer

#: Key of the outer optimizer's statistics in the state of the one that does local steps.
OUTER_STATE = "outer_state"


@dataclass(frozen=True)
class CheckpointLayout:
    """Parameters that a module gave to its optimizer.

    Attributes:
        trained: For each parameter group, whether each of its parameters is trained.
    """

    trained: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> CheckpointLayout:
        """Return the layout of an optimizer with all parameters."""
        groups = optimizer.param_groups
        return cls(tuple(tuple(each.requires_grad for each in group["params"]) for group in groups))

    @property
    def _places(self) -> list[int]:
        """Places of the trained parameters among all."""
        flags = (flag for group in self.trained for flag in group)
        return [place for place, flag in enumerate(flags) if flag]

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of an optimizer of the trained parameters with the places of all."""
        return _moved(state, dict(enumerate(self._places)), map(len, self.trained))

    def reduced(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the places of the trained parameters.

        One of earlier versions, or of an optimizer that was not given frozen parameters, has them.
        """
        if [len(group["params"]) for group in state["param_groups"]] != [*map(len, self.trained)]:
            return dict(state)
        places = {place: own for own, place in enumerate(self._places)}
        return _moved(state, places, map(sum, self.trained))


def _moved(
    state: Mapping[str, Any], places: Mapping[int, int], sizes: Iterable[int]
) -> dict[str, Any]:
    """Return a state whose parameters have other places; those without one are left out.

    Args:
        state: The ``state_dict`` of an optimizer; further keys among its statistics are kept.
        places: Place before to place after.
        sizes: Parameters of each group afterwards.
    """
    sizes = list(sizes)
    begins = [0, *accumulate(sizes)]
    groups = [
        {**group, "params": list(range(begin, begin + size))}
        for group, begin, size in zip(state["param_groups"], begins, sizes, strict=False)
    ]
    statistics = {
        key: {
            places.get(place, place): values
            for place, values in state[key].items()
            if place in places or not isinstance(place, int)
        }
        for key in ("state", OUTER_STATE)
        if key in state
    }
    return {**state, **statistics, "param_groups": groups}
