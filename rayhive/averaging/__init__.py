"""Averaging of gradients and parameters among the peers of a round."""

from __future__ import annotations

from rayhive.registry import AVERAGERS

AVERAGERS.register_lazy("powersgd", "rayhive.averaging.gradient_averager:RayhivePowerSGDAverager")
