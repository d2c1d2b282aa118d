"""Samplers of a study, by name: which configuration is tried next."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable

import optuna
from optuna.samplers import BaseSampler

from rayhive.spec import SamplerName

#: Trials that a sampler draws at random before it learns, and the size of a generation of NSGA-II.
STARTUP_TRIALS = 10


def make_sampler(name: SamplerName, seed: int, trials: int) -> BaseSampler:
    """Return the sampler of the next suggestion of a study that has ``trials`` trials.

    Each suggestion has a sampler of its own, whose seed depends on both numbers: what a resumed
    study is suggested does not depend on the draws of earlier drivers.

    Args:
        name: Name of the sampler. A grid asks it for nothing.
        seed: Seed of the study.
        trials: Trials that the study has.
    """
    digest = hashlib.blake2b(f"sampler/{seed}/{trials}".encode(), digest_size=4).digest()
    return _SAMPLERS[name](int.from_bytes(digest, "big"))


def _tpe(seed: int) -> BaseSampler:
    # Axes are sampled independently because they are conditional: a joint model could only use
    # axes that every trial has.
    return optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=False, constant_liar=True
    )


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():  # it is marked as experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False
        )


def _nsga2(seed: int) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=STARTUP_TRIALS)


def _random(seed: int) -> BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


_SAMPLERS: dict[SamplerName, Callable[[int], BaseSampler]] = {
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": _nsga2,
    "random": _random,
    "grid": _random,
}
