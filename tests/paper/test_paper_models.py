"""The PowerSGD paper's models, to the byte (arXiv:1905.13727)."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest

from rayhive.registry import WORKLOADS

FLOAT = 4  # bytes

Shape = tuple[int, ...]


@pytest.fixture(scope="module", params=["resnet18_cifar10", "lstm_wikitext2"])
def model(request: pytest.FixtureRequest) -> tuple[str, list[Shape]]:
    return request.param, WORKLOADS.get(request.param)().parameter_shapes()


def as_the_paper_does(shape: Shape) -> Shape:
    """Output dimension against all the others."""
    return shape[0], prod(shape[1:])


def as_hivemind_does(shape: Shape) -> Shape:
    """The two adjacent dimensions with the smallest product merge until two are left."""
    dims = list(shape)
    while len(dims) > 2:
        products = [a * b for a, b in pairwise(dims)]
        at = products.index(min(products))
        dims[at : at + 2] = [products[at]]
    return dims[0], dims[1]


def test_parameters_and_dense_bytes(model: tuple[str, list[Shape]]) -> None:
    name, shapes = model
    count = sum(prod(shape) for shape in shapes)
    assert count == {"resnet18_cifar10": 11_173_962, "lstm_wikitext2": 28_949_319}[name]
    assert FLOAT * count == {"resnet18_cifar10": 44_695_848, "lstm_wikitext2": 115_797_276}[name]


@pytest.mark.parametrize("view", [as_the_paper_does, as_hivemind_does])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_bytes(model: tuple[str, list[Shape]], rank: int, view: object) -> None:
    name, shapes = model
    expected = {
        "resnet18_cifar10": {1: 183_740, 2: 329_040, 4: 619_640},
        "lstm_wikitext2": {1: 373_952, 2: 570_028, 4: 962_180},
    }
    assert callable(view)
    numbers = 0
    for shape in shapes:
        if len(shape) == 1:
            numbers += shape[0]  # vectors go as they are
        else:
            rows, columns = view(shape)
            numbers += min(rank, rows, columns) * (rows + columns)  # the factors P and Q
    assert FLOAT * numbers == expected[name][rank]


def test_the_largest_matrices_are_those_of_the_paper(model: tuple[str, list[Shape]]) -> None:
    name, shapes = model
    views = [as_the_paper_does(shape) for shape in shapes if len(shape) > 1]
    if name == "resnet18_cifar10":
        assert len(views) == 21
        assert max(views, key=prod) == (512, 4608)
        assert views[0] == (64, 27)
        assert views[-1] == (10, 512)
    else:
        assert sorted(views) == [(2600, 650)] * 6 + [(28_869, 650)]
