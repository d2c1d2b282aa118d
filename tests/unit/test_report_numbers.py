"""Numbers and intervals as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.report.numbers import estimate_text, interval_text, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (44695848, "44,695,848"),
        (44695848.0, "44,695,848"),
        (5333.333333, "5,333"),
        (0.9411764, "0.9412"),
        (78.125001, "78.13"),
        (0.00123456, "0.001235"),
        (0.000123456, "1.235e-04"),
        (-2.5, "-2.500"),
        (math.inf, "inf"),
    ],
)
def test_a_number_alone(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.5123456, 0.0634567, "0.512 ± 0.063"),
        (12.3456, 0.00996, "12.346 ± 0.010"),
        (12345.678, 1234.5, "12,300 ± 1,200"),
        (99.4, 12.27, "99 ± 12"),
        (3.2e-8, 4.56e-9, "(3.20 ± 0.46)e-08"),
        (1e-5, 2e-3, "0.0000 ± 0.0020"),
        (4000.0, 0.0, "4,000"),
        (4000.5, None, "4,000"),
    ],
)
def test_a_number_with_its_interval(mean: float, half: float | None, text: str) -> None:
    assert estimate_text(mean, half) == text


@given(
    st.floats(min_value=-1e12, max_value=1e12, allow_subnormal=False),
    st.floats(min_value=1e-12, max_value=1e12),
)
def test_printed_numbers_are_within_their_rounding(mean: float, half: float) -> None:
    text = estimate_text(mean, half)
    number, _, rest = text.lstrip("(").partition(" ± ")
    spread, _, exponent = rest.partition(")e")
    scale = 10.0 ** int(exponent or 0)
    printed = float(number.replace(",", "")) * scale
    error = float(spread.replace(",", "")) * scale
    assert error == pytest.approx(half, rel=0.051)
    assert abs(printed - mean) <= 0.1 * half + 1e-9 * abs(mean)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.0612, 0.397, 2.81), "1.06 [0.397, 2.81]"),
        ((1_249_000.0, 1_240_000.0, 1_258_000.0), "1.25e+06 [1.24e+06, 1.26e+06]"),
        ((0.0001234, 0.00012, 0.000128), "1.23e-04 [1.20e-04, 1.28e-04]"),
    ],
)
def test_ends_of_an_interval_have_three_digits(
    values: tuple[float, float, float], text: str
) -> None:
    assert interval_text(*values) == text
