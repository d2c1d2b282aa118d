"""A study that is ready to run: its configuration, and what its workload says about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rayhive.compression
import rayhive.faults  # noqa: F401  (both fill the registries that the checks look names up in)
from rayhive.errors import ConfigError, Problem, described
from rayhive.metrics.rows import NO_FAULTS
from rayhive.registry import CODECS
from rayhive.spec import (
    DEFAULT_MIN_COMPRESSION_RATIO,
    DEFAULT_THRESHOLD,
    Configuration,
    SweepConfig,
    load_sweep,
    validate_sweep,
)
from rayhive.sweep.scenarios import check_scenarios, expanded, with_twin

if TYPE_CHECKING:
    from rayhive.workloads.base import Workload


@dataclass(frozen=True)
class Study:
    """What the driver needs to know.

    Attributes:
        config: The study, with every enqueued configuration spelled out in full.
        shapes: Shapes of the workload's parameters, from which bytes are predicted.
        batch_size: Samples in one micro-batch of one peer.
        data: Whether the workload's data is ``real`` or ``generated``.
        twin_added: Whether the scenario ``none`` was added, as others are compared with it.
        data_files: Files and folders of data that the workload names.
    """

    config: SweepConfig
    shapes: tuple[tuple[int, ...], ...]
    batch_size: int
    data: str
    twin_added: bool = False
    data_files: tuple[Path, ...] = ()


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study from a YAML file and check it against its workload.

    Args:
        path: The file.
        overrides: ``a.b=c`` strings that replace single fields.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    check = _WorkloadCheck()
    return _study(load_sweep(path, overrides, checks=[check, check_scenarios]), check)


def make_study(data: Mapping[str, Any], source: str | None = None) -> Study:
    """Build a study from plain data, as :func:`load_study` does from a file.

    Raises:
        ConfigError: With every mistake in it.
    """
    check = _WorkloadCheck()
    return _study(validate_sweep(data, source, checks=[check, check_scenarios]), check)


def completed(configuration: Configuration) -> Configuration:
    """Return ``configuration`` with the defaults of what it leaves out but uses."""
    update: dict[str, Any] = {}
    if configuration.threshold is None and CODECS.get(configuration.codec).uses_threshold:
        update["threshold"] = DEFAULT_THRESHOLD
    if configuration.powersgd_rank is not None and configuration.min_compression_ratio is None:
        update["min_compression_ratio"] = DEFAULT_MIN_COMPRESSION_RATIO
    return configuration.model_copy(update=update)


@dataclass
class _WorkloadCheck:
    """Checks the workload of a study and keeps it, so that it is made once."""

    workload: Workload | None = field(default=None, init=False)
    shapes: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    data_files: tuple[Path, ...] = field(default=(), init=False)

    def __call__(self, config: SweepConfig) -> Iterator[Problem]:
        from rayhive.workloads.loading import load_workload

        given = config.workload
        try:
            self.workload = load_workload(given.name, given.import_path, given.args)
        except ConfigError as error:
            yield from error.problems
            return
        needed, target = self.workload.default_batch_size, config.swarm.target_batch_size
        if config.swarm.batch_size is None and target < needed:
            yield Problem(
                "swarm.target_batch_size",
                target,
                f"at least one peer's batch size, by default {needed} with this workload: "
                "a smaller round is over before it began",
            )
        peers = config.swarm.peers
        try:
            size = self.workload.train_size()
            self.shapes = tuple(tuple(shape) for shape in self.workload.parameter_shapes())
            self.data_files = tuple(self.workload.data_files())
        except ConfigError as error:
            yield from error.problems
            return
        except Exception as error:  # somebody's methods
            key = "workload.name" if given.import_path is None else "workload.import"
            allowed = f"a workload that works; it raised {described(error)}"
            yield Problem(key, given.label, allowed)
            return
        if size is not None and peers > size:
            yield Problem(
                "swarm.peers", peers, f"at most the {size} samples that the workload trains on"
            )


def _study(config: SweepConfig, check: _WorkloadCheck) -> Study:
    workload = check.workload
    if workload is None:  # the check has run and found nothing wrong
        raise RuntimeError("a study was accepted without a workload")
    enqueue = tuple(completed(configuration) for configuration in config.enqueue)
    whole = expanded(config)
    scenarios = with_twin(whole.scenarios)
    return Study(
        config=whole.model_copy(update={"enqueue": enqueue, "scenarios": scenarios}),
        shapes=check.shapes,
        batch_size=config.swarm.batch_size or workload.default_batch_size,
        data=workload.data,
        twin_added=NO_FAULTS not in config.scenarios and NO_FAULTS in scenarios,
        data_files=check.data_files,
    )
