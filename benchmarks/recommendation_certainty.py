"""How often the recommendation is right at the certainty that it states, by simulation.

Usage: ``python benchmarks/recommendation_certainty.py [--studies N] [--seed N]``, without a
network. Each simulated study has rows whose true values are known. Its recommendation is compared
with the row that the same rule chooses from the true values. Equal seeds give equal numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.interval_coverage import ROWS, row
from rayhive.columns import FoldedRow
from rayhive.report.recommendation import LIKELY, MARGIN, SURE, choose, recommend

OBJECTIVES = {"round_p50_s": "minimize", "averaging_p50_s": "minimize"}
REPLICATES = (2, 3, 5, 10)
#: Deviations of the rows' true logarithms: rows that differ much, little, and hardly.
DIFFERENCES = (0.2, 0.05, 0.02)
#: Deviation of the logarithm from replicate to replicate of one row.
NOISE = 0.1
#: Lowest certainty of each word of a recommendation.
WORDS = {"sure": SURE, "likely": LIKELY, "cannot tell": 0.0}


@dataclass(frozen=True)
class Made:
    """Recommendation of a simulated study.

    Attributes:
        word: One of :data:`WORDS`.
        right: Whether its row is the one that the rule chooses from the true values.
        cost: Logarithm of the factor by which the true values of its row are worse than the rule
            allows: than the best row's and 10 % in the first objective, or than the right row's in
            the second.
    """

    word: str
    right: bool
    cost: float


def study(
    generator: np.random.Generator, n: int, difference: float
) -> tuple[NDArray[np.float64], list[FoldedRow]]:
    """Return the true logarithms of a study, row x objective, and the rows of its table.

    Args:
        generator: Source of the numbers.
        n: Replicates.
        difference: Deviation of the rows' true logarithms.
    """
    truth = generator.normal(0, difference, (ROWS, len(OBJECTIVES)))
    seeds = generator.normal(0, NOISE, (1, len(OBJECTIVES), n))
    values = np.exp(truth[:, :, None] + seeds + generator.normal(0, NOISE, (*truth.shape, n)))
    rows = []
    for index, columns in enumerate(values.tolist()):
        found = row(str(index), **dict(zip(OBJECTIVES, columns, strict=True)))
        found |= {"n": n, "n_failed": 0, "n_pruned": 0, "reached": None}
        found |= dict(zip(OBJECTIVES, np.mean(columns, axis=1).tolist(), strict=True))
        rows.append(found)
    return truth, rows


def made(n: int, difference: float, studies: int, seed: int) -> list[Made]:
    """Return the recommendations of simulated studies.

    Args:
        n: Replicates.
        difference: Deviation of the rows' true logarithms.
        studies: Number of studies.
        seed: Seed.
    """
    generator = np.random.default_rng([seed, n, round(1000 * difference)])
    found = []
    for _ in range(studies):
        truth, rows = study(generator, n, difference)
        advice = recommend(rows, OBJECTIVES, {})
        assert advice.row is not None and advice.certainty is not None
        taken, right = int(advice.row["configuration"]), choose(truth, (True, True))
        slower = truth[taken, 0] - truth[:, 0].min() - math.log1p(MARGIN)
        dearer = truth[taken, 1] - truth[int(np.argmax(right)), 1]
        word = next(word for word, least in WORDS.items() if advice.certainty >= least)
        found.append(Made(word, bool(right[taken]), float(max(slower, dearer, 0.0))))
    return found


def cell(found: Sequence[Made]) -> str:
    """Return the number of recommendations, the share that is right, and the costs as text."""
    if not found:
        return "none"
    cost = math.expm1(float(np.quantile([each.cost for each in found], 0.95)))
    right = sum(each.right for each in found) / len(found)
    return f"{len(found)}, {right:.0%} right, {cost:.0%} worse"


def claim(found: Sequence[Made], word: str) -> Claim:
    """Return the claim that a word is right as often as it says, with Wilson's interval."""
    right = [each.right for each in found if each.word == word]
    share = binomtest(sum(right), len(right))
    ends = share.proportion_ci(method="wilson")
    text = f"rows that differ by {DIFFERENCES[0]:.0%}: share of `{word}` that is right"
    return Claim(text, share.statistic, ends.low, ends.high, "", WORDS[word], True)


def main() -> None:
    """Print the table and the claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"| rows differ by, replicates | {' | '.join(WORDS)} |")
    print(f"|---|{'---|' * len(WORDS)}")
    clear: list[Made] = []
    for difference in DIFFERENCES:
        for n in REPLICATES:
            found = made(n, difference, options.studies, options.seed)
            cells = [cell([each for each in found if each.word == word]) for word in WORDS]
            print(f"| {difference:.0%}, {n} | {' | '.join(cells)} |", flush=True)
            clear += found if difference == DIFFERENCES[0] else []
    print_claims(*(claim(clear, word) for word in ("sure", "likely")))


if __name__ == "__main__":
    main()
