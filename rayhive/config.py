"""A study as the user writes it: one YAML file, one model, the same fields from Python.

Structure is pydantic's work; what may be combined with what is decided in
:mod:`rayhive.checks`. :func:`load_sweep` runs both and reports every mistake at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayhive.columns import Direction
from rayhive.errors import ConfigError, Problem, nearest

Delay = Literal["none", "state", "optimizer", "gradients"]
DELAYS: tuple[str, ...] = get_args(Delay)

#: hivemind's documented usage compresses tensors of more than 2**16 elements to 8 bits.
DEFAULT_THRESHOLD = 2**16 + 1
#: The default of hivemind's PowerSGD averager.
DEFAULT_MIN_COMPRESSION_RATIO = 0.5


class Model(BaseModel):
    """Base of every model that crosses a boundary: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Range(Model):
    """A numeric axis of the space.

    Attributes:
        low: Least value, included.
        high: Greatest value, included.
        log: Sample uniformly in the logarithm.
    """

    low: float
    high: float
    log: bool = False


def _axis(value: object) -> object:
    """Read a constant as a list of one, leaving lists and ranges alone."""
    if isinstance(value, (Mapping, Range)):
        return value if isinstance(value, Range) else Range.model_validate(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


Axis = Annotated[Range | tuple[Any, ...], BeforeValidator(_axis)]


class WorkloadConfig(Model):
    """What is trained: a registered workload by name, or the user's own by import path."""

    name: str | None = None
    import_path: str | None = Field(default=None, alias="import")
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name that results rows carry."""
        return self.name or self.import_path or "unnamed"


class Link(Model):
    """Shaping of a node's link."""

    rate_mbit: float | None = Field(default=None, gt=0)
    delay_ms: float = Field(default=0.0, ge=0)
    loss: float = Field(default=0.0, ge=0, lt=1)


class NodeClass(Model):
    """A class of nodes that hosts some of the peers.

    Attributes:
        count: Peers on nodes of this class.
        labels: Ray node labels that a node of this class must carry.
        gpus: GPUs of one peer; fractions share a GPU between peers.
        cpu_share: Share of a core that a peer gets.
        link: Shaping of the link.
        preemptible: Whether the cloud may take the node away.
    """

    count: int = Field(ge=1)
    labels: dict[str, str] = Field(default_factory=dict)
    gpus: float = Field(default=0.0, ge=0)
    cpu_share: float = Field(default=1.0, gt=0)
    link: Link | None = None
    preemptible: bool = False


class SwarmConfig(Model):
    """The peers of a trial and how they meet.

    Attributes:
        peers: Number of peers.
        target_batch_size: Samples per round, over the swarm.
        batch_size: Samples per micro-batch of one peer; the workload's default if absent.
        average_state_every: Rounds between two averagings of the parameters themselves.
        matchmaking_time: Longest wait for a group [s]; rounds start earlier when all are there.
        averaging_timeout: Longest time of one averaging [s].
        metadata_expiration: Seconds after which a silent peer is no longer counted as live.
        state_codec: Codec of the averaging of parameters.
        use_local_updates: Step locally on every batch and average parameters only.
        threads_per_peer: Torch threads of one peer.
        gpus_per_peer: GPUs of one peer when there are no node classes.
        node_classes: Where peers go, by the name of the class.
    """

    peers: int = Field(default=2, ge=1)
    target_batch_size: int = Field(default=256, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    average_state_every: int = Field(default=1, ge=1)
    matchmaking_time: float = Field(default=5.0, gt=0)
    averaging_timeout: float = Field(default=30.0, gt=0)
    metadata_expiration: float = Field(default=30.0, gt=0)
    state_codec: str = "none"
    use_local_updates: bool = False
    threads_per_peer: int = Field(default=1, ge=1)
    gpus_per_peer: float = Field(default=0.0, ge=0)
    node_classes: dict[str, NodeClass] | None = None


class Configuration(Model):
    """One point of the space: what a row of the results table stands for.

    Attributes:
        codec: Gradient codec.
        threshold: Elements from which ``size_adaptive`` uses 8 bits; None for other codecs.
        powersgd_rank: Rank of the factors; None averages gradients as they are.
        min_compression_ratio: Least fraction saved for a matrix to be factorised; None without
            PowerSGD.
        delay: What happens in the background; each choice includes those before it.
    """

    codec: str = "none"
    threshold: int | None = None
    powersgd_rank: int | None = None
    min_compression_ratio: float | None = None
    delay: Delay = "none"

    @property
    def label(self) -> str:
        """A short stable name, unique among configurations that differ."""
        parts = [self.codec if self.threshold is None else f"{self.codec}({self.threshold})"]
        if self.powersgd_rank is not None:
            parts.append(f"rank{self.powersgd_rank}(≥{self.min_compression_ratio:.4g})")
        if self.delay != "none":
            parts.append(f"delay-{self.delay}")
        return " ".join(parts)


class Space(Model):
    """The axes of the sweep; a constant is an axis of one point."""

    codec: Axis = ("none",)
    threshold: Axis = (DEFAULT_THRESHOLD,)
    powersgd_rank: Axis = (None,)
    min_compression_ratio: Axis = (DEFAULT_MIN_COMPRESSION_RATIO,)
    delay: Axis = ("none",)


class Budget(Model):
    """When to stop.

    Attributes:
        trials: Configurations to try.
        seconds_per_replicate: Longest training time of one replicate [s].
        samples_per_replicate: Committed samples after which a replicate is complete; without it
            the seconds are the budget.
        stop_at_target: End a replicate when its target is reached.
    """

    trials: int = Field(default=24, ge=1)
    seconds_per_replicate: float = Field(default=120.0, gt=0)
    samples_per_replicate: int | None = Field(default=None, ge=1)
    stop_at_target: bool = False


class Evaluation(Model):
    """When the held-out split is evaluated.

    Attributes:
        every_samples: Committed samples between two evaluations.
    """

    every_samples: int = Field(default=2048, ge=1)


class SweepConfig(Model):
    """One study."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    workload: WorkloadConfig
    swarm: SwarmConfig = SwarmConfig()
    space: Space = Space()
    enqueue: tuple[Configuration, ...] = ()
    scenarios: tuple[str, ...] = Field(default=("none",), min_length=1)
    replicates: int = Field(default=3, ge=1)
    objectives: dict[str, Direction] = Field(
        default={"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"},
        min_length=1,
    )
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    seed: int = Field(default=0, ge=0)
    storage: str | None = None

    def to_yaml(self) -> str:
        """Return the resolved study as YAML that :func:`load_sweep` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False)


#: Finds what is wrong with a study whose structure is right.
Check: TypeAlias = Callable[["SweepConfig"], Iterable[Problem]]


def load_sweep(
    path: str | Path, overrides: Sequence[str] = (), checks: Sequence[Check] = ()
) -> SweepConfig:
    """Read a study from a YAML file.

    Args:
        path: The file.
        overrides: ``a.b=c`` strings that replace single fields; the values are YAML.
        checks: Further rules, of layers that know more than this one.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            Problem("FILE", str(path), f"a readable YAML file ({error.strerror})", _sibling(file))
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(Problem("FILE", str(path), f"valid YAML: {error}")) from error
    if not isinstance(data, dict):
        raise ConfigError(Problem("FILE", str(path), "a mapping of keys to values"))
    problems = _override(data, overrides)
    return validate_sweep(data, str(path), problems, checks)


def validate_sweep(
    data: Mapping[str, Any],
    source: str | None = None,
    problems: Sequence[Problem] = (),
    checks: Sequence[Check] = (),
) -> SweepConfig:
    """Build a study from plain data, reporting every mistake in it at once.

    Raises:
        ConfigError: With ``problems`` and all that were found.
    """
    from rayhive.checks import check_sweep

    found = list(problems)
    config = _validate(data, found)
    if config is not None:
        known = {problem.key for problem in found}
        for check in (check_sweep, *checks):
            found.extend(problem for problem in check(config) if problem.key not in known)
    if found or config is None:
        raise ConfigError(found, source)
    return config


def _validate(data: Mapping[str, Any], problems: list[Problem]) -> SweepConfig | None:
    """Validate; on mistakes note them, drop what is wrong and go on with the rest."""
    rest: Any = _copy(data)
    for _ in range(8):
        try:
            return SweepConfig.model_validate(rest)
        except ValidationError as error:
            for item in error.errors():
                problem = _problem(item)
                if all(known.key != problem.key for known in problems):
                    problems.append(problem)
                _mend(rest, item)
    return None


_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "workload": {"name": None}}


def _mend(data: Any, item: Any) -> None:
    """Change ``data`` so that this finding is gone and the rest can be looked at."""
    location = item["loc"]
    if item["type"] != "missing":
        _drop(data, location)
    elif len(location) == 1:
        data[location[0]] = _PLACEHOLDERS[location[0]]
    else:
        _drop(data, location[:-1])


def _problem(item: Any) -> Problem:
    """Turn one of pydantic's findings into a problem with a key, a value and what is allowed."""
    location = [part for part in item["loc"] if part not in ("Range", "tuple[any, ...]")]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1])
        return Problem(
            key,
            item["input"],
            f"an unknown key; known are {', '.join(fields)}" if fields else "an unknown key",
            nearest(location[-1], fields),
        )
    if item["type"] == "missing":
        return Problem(key, None, "required")
    close = None
    if item["type"] == "literal_error":
        close = nearest(item["input"], [w.strip("' ") for w in item["ctx"]["expected"].split("'")])
    text = str(item["msg"])
    return Problem(key, item["input"], text[:1].lower() + text[1:], close)


def _fields_at(location: Sequence[Any]) -> list[str]:
    """Return the keys that the model at ``location`` knows."""
    model: Any = SweepConfig
    for part in location:
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        model = next(
            (
                candidate
                for candidate in _flatten(field.annotation)
                if isinstance(candidate, type) and issubclass(candidate, BaseModel)
            ),
            model,
        )
    fields = model.model_fields
    return [field.alias or name for name, field in fields.items()]


def _flatten(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    return [annotation, *(leaf for argument in arguments for leaf in _flatten(argument))]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _drop(data: Any, location: Sequence[Any]) -> None:
    """Remove the deepest part of ``data`` that ``location`` names."""
    holder, last = None, None
    for part in location:
        if isinstance(data, dict) and part in data or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            holder, last = data, part
            data = data[part]
    if isinstance(holder, (dict, list)):
        del holder[last]  # type: ignore[arg-type]


def _override(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(Problem("--set", override, "KEY=VALUE, for example replicates=2"))
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            problems.append(Problem(f"--set {key}", text, f"a YAML value: {error}"))
            continue
        *parents, last = key.split(".")
        holder: Any = data
        for parent in parents:
            holder = holder.setdefault(parent, {})
            if not isinstance(holder, dict):
                problems.append(Problem(f"--set {key}", text, f"{parent} holds no keys"))
                break
        else:
            holder[last] = value
    return problems


def _sibling(file: Path) -> str | None:
    folder = file.parent
    names = [str(folder / item.name) for item in folder.glob("*.y*ml")] if folder.is_dir() else []
    return nearest(str(file), names)
