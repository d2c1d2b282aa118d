"""Averagers that take over the state of another peer."""

from __future__ import annotations

from typing import Any

import pytest
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from rayhive.averaging.factory import takes_over_state
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager


class KeepsMomentum(RayhiveGradientAverager):
    """Averager of a user, with a state that a joining peer needs."""

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        return super().load_state_from_peers(wait, timeout)


@pytest.mark.parametrize(
    ("averager", "takes"),
    [
        (GradientAverager, False),
        (RayhiveGradientAverager, False),
        (PowerSGDGradientAverager, True),
        (RayhivePowerSGDAverager, True),
        (KeepsMomentum, True),
    ],
)
def test_a_joining_peer_downloads_only_states_that_its_averager_uses(
    averager: type, takes: bool
) -> None:
    assert takes_over_state(averager) is takes
