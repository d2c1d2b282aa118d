"""Calls of the user's code: with equal random numbers, and with errors that name the call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rayhive.errors import ConfigError, Problem, RayhiveError, described, user_line


class LengthError(Exception):
    """The user's code asks a trainer for the length of a run.

    Args:
        name: Attribute of the trainer that was read.
    """


@contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators for the body, and restore them afterwards.

    Every peer builds the module and the data in such a body, so that both are equal on all peers
    even if they are random.
    """
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextmanager
def calling(what: str, key: str, value: str) -> Iterator[None]:
    """Turn an exception of the user's code in the body into a problem of the study.

    Args:
        what: The code that is called, for example ``train_dataloader``.
        key: Key of the study that named the code.
        value: Its value.

    Raises:
        ConfigError: The body raised.
    """
    try:
        yield
    except RayhiveError:
        raise
    except LengthError as error:
        allowed = (
            f"a module whose {what} does not read trainer.{error}{user_line(error)}: the budget of "
            "the study ends a run, so a trainer does not know its length; give the number of "
            "rounds as an argument of its constructor (workload.args, or workload.data_args of a "
            "data module)"
        )
        raise ConfigError(Problem(key, value, allowed)) from error
    except (Exception, SystemExit) as error:
        allowed = f"a module whose {what} works; it raised {described(error)}"
        raise ConfigError(Problem(key, value, allowed)) from error
