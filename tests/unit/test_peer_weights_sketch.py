from __future__ import annotations

import pytest
import torch

from rayhive.peer.weights_sketch import WeightsSketch, relative_distance


def _weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(64, 32), (64,), (7, 3, 3)]]


def test_equal_weights_have_equal_sketches_bit_for_bit() -> None:
    weights = _weights(0)
    first, second = WeightsSketch(weights), WeightsSketch(weights)
    assert first(weights) == second([tensor.clone() for tensor in weights])


def test_the_norm_is_exact() -> None:
    weights = _weights(1)
    norm, _, finite = WeightsSketch(weights)(weights)
    expected = torch.cat([tensor.flatten().double() for tensor in weights]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-12)
    assert finite


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1])
def test_distance_is_estimated_within_the_sketchs_error(scale: float) -> None:
    weights = _weights(2)
    moved = [tensor + scale * torch.randn_like(tensor) for tensor in weights]
    sketch = WeightsSketch(weights)
    norm_a, sketch_a, _ = sketch(weights)
    norm_b, sketch_b, _ = sketch(moved)
    difference = torch.cat([(a - b).flatten() for a, b in zip(weights, moved, strict=True)])
    true = float(difference.double().norm()) / max(norm_a, norm_b)
    # the squared estimate has a relative standard deviation of sqrt(2 / 64) = 0.18
    assert relative_distance(norm_a, sketch_a, norm_b, sketch_b) == pytest.approx(true, rel=0.4)


def test_one_changed_element_among_many_is_seen() -> None:
    weights = _weights(3)
    sketch = WeightsSketch(weights)
    before = sketch(weights)
    weights[0][5, 5] += 0.5
    after = sketch(weights)
    assert relative_distance(before[0], before[1], after[0], after[1]) == pytest.approx(
        0.5 / max(before[0], after[0]), rel=1e-6
    )


def test_a_nan_is_reported() -> None:
    weights = _weights(4)
    weights[1][0] = float("nan")
    assert WeightsSketch(weights)(weights)[2] is False


def test_zero_weights_are_at_no_distance() -> None:
    assert relative_distance(0.0, [0.0], 0.0, [0.0]) == 0.0
