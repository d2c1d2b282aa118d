"""Storage of trials: SQLite in the run folder, or any storage of Optuna by URL."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalRedisBackend
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from rayhive.errors import MASK, ConfigError, Problem, RayhiveError, without_secrets
from rayhive.sweep.journal import open_journal

if TYPE_CHECKING:
    from rayhive.spec import SweepConfig

#: User attribute of the study: identity of its run folder.
RUN_ATTRIBUTE = "run"
#: Longest wait for the creator of a study to set that attribute [s].
CLAIM_S = 5.0
_VARIABLE = re.compile(r"\$\{(\w+)\}")
REDIS = ("redis://", "rediss://", "unix://")
ALLOWED = (
    "a storage that Optuna can open: sqlite:///FILE, postgresql://… or mysql://… (with its driver "
    "installed), journal:///FILE or redis://…"
)


def check_storage(url: str) -> Iterator[Problem]:
    """Yield the mistakes in a storage URL that show without opening the storage."""
    allowed = _unusable(url)
    if allowed is not None:
        yield Problem("storage", url, allowed)


def _unusable(url: str) -> str | None:
    """Return the requirement that a storage URL does not meet, or None."""
    unset = sorted({name for name in _VARIABLE.findall(url) if name not in os.environ})
    if unset:
        return f"with variables that are set; not set: {', '.join(unset)}"
    if f":{MASK}@" in url or f"={MASK}" in url:
        return (
            "with its password: a run folder keeps none. Write ${NAME} in its place and set NAME "
            "in the environment, or pass the URL by --set storage=…"
        )
    url = expanded(url)
    file: str | None
    if url.startswith(REDIS):
        found = importlib.util.find_spec("redis")
        return None if found else "a storage whose driver is installed: install redis"
    if url.startswith("journal:"):
        file = _journal_file(url)
        if not file:
            return "journal:///FILE"
    else:
        try:
            parsed = make_url(url)
            parsed.get_dialect().import_dbapi()
        except (SQLAlchemyError, ValueError) as error:  # such as a port that is no number
            return f"{ALLOWED} ({_hidden(str(error), url)})"
        except ImportError as error:
            return f"{ALLOWED} ({error}; {_to_install(error.name)})"
        file = parsed.database if parsed.get_backend_name() == "sqlite" else None
        if parsed.get_backend_name() == "sqlite" and file in (None, "", ":memory:"):
            return "a storage that outlives the driver, in a named file"
    if file is not None and not Path(file).absolute().parent.is_dir():
        return f"a file in a folder that exists, not in {Path(file).parent}"
    return None


def _to_install(driver: str | None) -> str:
    if driver in (None, "psycopg"):  # without a name where the module lacks its C library
        return "install psycopg[binary], or rayhive with its extra postgresql"
    return f"install {driver}"


def expanded(url: str) -> str:
    """Return a storage URL with its ``${NAME}`` replaced by variables of the environment."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), url)


def open_study(config: SweepConfig, folder: Path, run: str) -> optuna.Study:
    """Open the study in its storage, or create it there.

    A study belongs to the run folder that created it, which the storage allows one folder only. An
    empty study that still belongs to none after :data:`CLAIM_S` is taken over: its creator died.

    Args:
        config: The study; its name is the name in the storage.
        folder: The run folder.
        run: Identity of the run folder; the study of another folder is refused.

    Raises:
        ConfigError: The storage cannot be opened, or its study of that name belongs to another
            run folder, or has its objectives in another order.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = config.storage
    try:
        storage = make_storage(expanded(url) if url else _sqlite(folder / "study.db"))
        study, created = _created_or_loaded(config, storage)
        # No other folder uses the database in this one.
        owner = None if created else _owner(study, 0.0 if url is None else CLAIM_S)
        trials = len(study.get_trials(deepcopy=False))
        if owner is None and not trials:
            study.set_user_attr(RUN_ATTRIBUTE, run)
            owner = run
        names, known = list(config.objectives), study.metric_names or []
        swapped = bool(trials) and known != names and sorted(known) == sorted(names)
        if (url is None or owner == run) and not swapped:
            _set_names(study, names)
    except _errors(OSError, RuntimeError) as error:  # the last of another version of Optuna
        first = _hidden(str(error).splitlines()[0], url)
        raise ConfigError(Problem("storage", url, f"{ALLOWED} ({first})")) from None
    except (ValueError, LookupError, TypeError) as error:  # a journal with a damaged line
        reason = f"an undamaged storage: {_hidden(repr(error), url)}"
        raise ConfigError(Problem("storage", url, reason)) from None
    if url is not None and owner != run:
        allowed = (
            f"a storage without a study {config.name!r} of another run folder; "
            "choose another name, or continue in the folder that it was started in"
        )
        raise ConfigError(Problem("storage", url, allowed))
    if swapped:  # the values of its trials have the order of the names
        allowed = f"in the order {', '.join(known)}, as in the study of the storage"
        raise ConfigError(Problem("objectives", ", ".join(names), allowed))
    return study


def _created_or_loaded(config: SweepConfig, storage: BaseStorage) -> tuple[optuna.Study, bool]:
    """Return the study of a storage, and whether it was created now."""
    name, pruner = config.name, optuna.pruners.NopPruner()
    directions = list(config.objectives.values())
    try:
        study = optuna.create_study(
            storage=storage, study_name=name, directions=directions, pruner=pruner
        )
    except optuna.exceptions.DuplicatedStudyError:
        return optuna.load_study(study_name=name, storage=storage, pruner=pruner), False
    return study, True


def _owner(study: optuna.Study, wait_s: float) -> str | None:
    """Return the run folder that a study belongs to; wait for it while the study is empty."""
    until = time.monotonic() + wait_s
    while True:
        owner: str | None = study.user_attrs.get(RUN_ATTRIBUTE)
        if owner is not None or time.monotonic() >= until or study.get_trials(deepcopy=False):
            return owner
        time.sleep(0.05)


def _set_names(study: optuna.Study, names: list[str]) -> None:
    """Name the objectives in the storage, for optuna-dashboard and plots."""
    if study.metric_names != names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(names)


def _hidden(text: str, url: str | None) -> str:
    """Return the error text of a database driver without the password of the URL."""
    with suppress(SQLAlchemyError, ValueError):
        password = make_url(expanded(url or "")).password
        if password:
            text = text.replace(password, MASK)
    return text


def make_storage(url: str) -> BaseStorage:
    """Return the storage of Optuna at a URL."""
    if url.startswith(REDIS):
        return JournalStorage(JournalRedisBackend(url))
    if url.startswith("journal:"):
        return open_journal(_journal_file(url))
    # A database may close connections that were idle during a replicate.
    return RDBStorage(url, engine_kwargs={"pool_pre_ping": not url.startswith("sqlite")})


@contextmanager
def usable(url: str | None) -> Iterator[None]:
    """Turn the errors of a database that fails during a sweep into one :class:`RayhiveError`.

    Args:
        url: URL of the storage; None for the database in the run folder.

    Raises:
        RayhiveError: The database cannot be reached, or refuses a statement.
    """
    try:
        yield
    except _errors() as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = _hidden(str(cause).splitlines()[0], url)
        raise RayhiveError(
            f"the storage {without_secrets(url or 'of the run folder')} can't be used: {first}. "
            "Finished replicates are kept; the same command resumes the sweep"
        ) from error


def _errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of databases. Redis's driver, which has its own, need not be installed."""
    redis = sys.modules.get("redis")
    own = () if redis is None else (redis.exceptions.RedisError,)
    return (SQLAlchemyError, optuna.exceptions.StorageInternalError, *own, *others)


def _journal_file(url: str) -> str:
    """Return the file of ``journal:///abs/olute`` or ``journal:rel/ative``."""
    rest = url.removeprefix("journal:")
    return rest[2:] if rest.startswith("//") else rest


def _sqlite(file: Path) -> str:
    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)
