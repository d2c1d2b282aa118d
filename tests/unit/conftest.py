"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rayhive.compression.kernels import eight_bit


@pytest.fixture(scope="module", params=["compiled", "torch"])
def loops_of_both_kinds(request: pytest.FixtureRequest) -> Iterator[None]:
    """The 8-bit codecs with numba, and as where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(eight_bit, "loops", lambda: None)
        else:
            assert eight_bit.loops() is not None
        yield
