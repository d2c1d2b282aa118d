"""Pairwise gossip: the outer step of local steps whose rounds average in random pairs.

This is NoLoCo (Kolehmainen et al., 2025, arXiv:2506.10911). Each peer i has outer ("slow")
parameters P_i and an outer momentum d_i of its own. After its local steps it has the local
parameters T_i, and the pseudo-gradient D_i = P_i - T_i. With the means over the pair, the momentum
m, the outer learning rate b and the pull g, the outer step is

    d_i <- m d_i - b mean(D) - g (P_i - mean(P)),    P_i <- P_i + d_i.

As in the authors' implementation, g = b. Then only the sum D_i - P_i = -T_i matters: for
v_i = -d_i / b, the step is v_i <- m v_i + (P_i - mean(T)) and P_i <- P_i - b v_i. A pair therefore
exchanges its local parameters and nothing else. This is a step of SGD with the "gradient" -mean(T),
and a weight decay of 1, which adds P_i to it.

A peer weighs with its samples, in both means. A peer whose averaging failed steps with its own
-T_i: its own pseudo-gradient, and no pull.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from hivemind.compression import NoCompression

from rayhive.averaging.factory import made_by, takes_over_state, takes_rules
from rayhive.averaging.pairing import PAIR
from rayhive.errors import Problem

#: Settings that pairs exclude -> the values that they leave.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fragments": ((None, 1), "1 (or absent)"),
    "mixing": ((None,), "absent"),
    "inner_state": ((None, "keep", "reset"), "keep or reset"),
    "average_state_every": ((None, "auto"), "auto (or absent)"),
    "aggregation": ((None, "mean"), "mean (or absent)"),
    "min_peers": ((None,), "None (or absent)"),
    "error_feedback": ((None, False), "False (or absent)"),
    "delay_state_averaging": ((None, False), "False"),
    "delay_optimizer_step": ((None, False), "False"),
    "delay_grad_averaging": ((None, False), "False"),
}
#: Codecs, which would encode parameters here and not their differences.
_CODECS = ("grad_compression", "state_averaging_compression")


def outer_optimizer(groups: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return the outer optimizer of a peer, for a gradient of minus the pair's mean parameters.

    hivemind creates the momentum by a step with zero gradients, so :func:`begin` sets the decay.

    Args:
        groups: Parameter groups of the outer parameters.
        lr: Outer learning rate, which is also the pull towards the mean of the pair.
        momentum: Outer momentum; 0 keeps none.
    """
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Let an outer optimizer add each parameter to its gradient from now on."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 1.0


def sent(parameters: Sequence[torch.Tensor], samples: int) -> tuple[list[torch.Tensor], int]:
    """Return what a peer sends to its pair, and its weight.

    Args:
        parameters: Local parameters of the peer.
        samples: Its samples. A peer without samples weighs as one: its parameters are those of a
            replica all the same, and a pair needs a weight.
    """
    return [parameter.detach().neg() for parameter in parameters], max(1, samples)


def problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find the problems of pairs among an optimizer's arguments."""
    size = options.get("group_size")
    if size is None:
        return
    if isinstance(size, bool) or size != PAIR:
        yield Problem("group_size", size, f"{PAIR}, or None for all peers")
        return
    for name, (values, text) in _ALLOWED.items():
        if options.get(name) not in values:
            yield Problem(name, options[name], f"{text} with group_size {PAIR}")
    for name in _CODECS:
        codec = options.get(name)
        if codec is not None and not isinstance(codec, NoCompression):
            allowed = f"absent with group_size {PAIR}: it would encode parameters"
            yield Problem(name, type(codec).__name__, allowed)
    averager = made_by(options.get("grad_averager_factory"))
    if takes_rules(averager) and takes_over_state(averager):
        yield Problem("grad_averager_factory", averager.__name__, f"dense with group_size {PAIR}")
