from __future__ import annotations

import pytest
import torch

from rayhive.events import Weights
from rayhive.peer.measurements import WeightsSketch


def _weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(64, 32), (64,), (7, 3, 3)]]


def test_equal_weights_have_equal_sketches_bit_for_bit() -> None:
    weights = _weights(0)
    first, second = WeightsSketch(weights), WeightsSketch(weights)
    one, other = first(1, weights), second(1, [tensor.clone() for tensor in weights])
    assert (one.norm, one.sketch) == (other.norm, other.sketch) and len(one.sketch) == 64


def test_the_norm_is_exact() -> None:
    weights = _weights(1)
    event = WeightsSketch(weights)(1, weights)
    expected = torch.cat([tensor.flatten().double() for tensor in weights]).norm()
    assert event.norm == pytest.approx(float(expected), rel=1e-12)
    assert event.finite


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1])
def test_distance_is_estimated_within_the_sketchs_error(scale: float) -> None:
    weights = _weights(2)
    moved = [tensor + scale * torch.randn_like(tensor) for tensor in weights]
    sketch = WeightsSketch(weights)
    a, b = sketch(1, weights), sketch(1, moved)
    difference = torch.cat([(a - b).flatten() for a, b in zip(weights, moved, strict=True)])
    true = float(difference.double().norm()) / max(a.norm, b.norm)
    # the squared estimate has a relative standard deviation of sqrt(2 / 64) = 0.18
    assert a.distance(b) == pytest.approx(true, rel=0.4)


def test_one_changed_element_among_many_is_seen() -> None:
    weights = _weights(3)
    sketch = WeightsSketch(weights)
    before = sketch(1, weights)
    weights[0][5, 5] += 0.5
    after = sketch(2, weights)
    expected = 0.5 / max(before.norm, after.norm)
    assert before.distance(after) == pytest.approx(expected, rel=1e-6)


def test_a_nan_is_reported() -> None:
    weights = _weights(4)
    weights[1][0] = float("nan")
    assert WeightsSketch(weights)(1, weights).finite is False


def test_zero_weights_are_at_no_distance() -> None:
    zero = Weights(round=1, norm=0.0, sketch=[0.0], finite=True)
    assert zero.distance(zero) == 0.0
