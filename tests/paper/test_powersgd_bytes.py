"""Bytes of the PowerSGD paper's models (Vogels et al., arXiv 1905.13727, tables 3, 4 and 5).

The shapes are written out here, independently of the workloads. MB of the paper are MiB.
"""

from __future__ import annotations

import math

import pytest

from rayhive.compression.payload import payload

Shapes = list[tuple[int, ...]]
RANKS = (1, 2, 4)


def resnet18_cifar10() -> Shapes:
    """Convolutions without bias, each with a normalisation (scale, shift), then one layer."""
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


def lstm_wikitext2() -> Shapes:
    """Three layers of 650, the embedding tied to the output, a vocabulary of 28,869."""
    layer: Shapes = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28_869, 650), *layer, *layer, *layer, (28_869,)]


MODELS = {
    "resnet18": (resnet18_cifar10(), 11_173_962, 44_695_848, (183_740, 329_040, 619_640)),
    "lstm": (lstm_wikitext2(), 28_949_319, 115_797_276, (373_952, 570_028, 962_180)),
}
#: Rounds an epoch, then MiB an epoch: SGD and ranks 1, 2, 4; then the printed factors.
PUBLISHED = {
    "resnet18": (24, "1023", ("4.21", "7.53", "14.18"), (243, 136, 72)),
    "lstm": (70, "7730", ("24.96", "38.05", "64.23"), (310, 203, 120)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_bytes_of_a_round(model: str, ratio: float) -> None:
    shapes, parameters, dense, ranks = MODELS[model]
    assert sum(map(math.prod, shapes)) == parameters
    assert payload(shapes).bytes_per_transfer == dense
    for rank, expected in zip(RANKS, ranks, strict=True):
        options = {"powersgd_rank": rank, "min_compression_ratio": ratio}
        predicted = payload(shapes, **options, factor_codec="none")
        assert predicted.bytes_per_transfer == expected
        assert predicted.dense_bytes == dense
        assert predicted.exact
        assert len(predicted.compressed) == sum(len(shape) > 1 for shape in shapes)


@pytest.mark.parametrize("model", MODELS)
def test_published_megabytes_and_factors(model: str) -> None:
    shapes = MODELS[model][0]
    rounds, sgd, ranks, factors = PUBLISHED[model]

    def mebibytes(transfer: int, digits: int) -> str:
        return f"{transfer * rounds / 2**20:.{digits}f}"

    assert mebibytes(payload(shapes).bytes_per_transfer, 0) == sgd
    for rank, printed, factor in zip(RANKS, ranks, factors, strict=True):
        predicted = payload(shapes, powersgd_rank=rank, factor_codec="none")
        assert mebibytes(predicted.bytes_per_transfer, 2) == printed
        assert round(predicted.ratio) == factor
