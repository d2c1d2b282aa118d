"""Construction of a workload from its registered name or from an import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from rayhive.errors import ConfigError, Problem, nearest, unknown, user_line
from rayhive.registry import WORKLOADS
from rayhive.spec.axes.base import is_whole
from rayhive.spec.study import WorkloadConfig
from rayhive.workloads.base import DataKind, Target, Workload
from rayhive.workloads.data import IndexedWorkload

IMPORT_KEY = "workload.import"
ARGS_KEY = "workload.args"
_BASES = (Workload, IndexedWorkload)
FORM = (
    "package.module:Attribute, a LightningModule, a Workload subclass or a function annotated to "
    "return one"
)
T = TypeVar("T")
DATA_KEY = "workload.data"
DATA_ARGS_KEY = "workload.data_args"
_OF_PLAIN = ("data", "data_args", "target")


def workload_of(config: WorkloadConfig) -> Workload:
    """Return the workload of a study's entry.

    Raises:
        ConfigError: There is no such workload, or it refuses its arguments or its data.
    """
    return load_workload(
        config.name,
        config.import_path,
        config.args,
        data=config.data,
        data_args=config.data_args,
        target=None if config.target is None else Target(**dict(config.target)),
    )


def load_workload(
    name: str | None,
    import_path: str | None = None,
    args: Mapping[str, Any] | None = None,
    *,
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
    target: Target | None = None,
) -> Workload:
    """Return a workload by its name or import path.

    Args:
        name: A registered name; exactly one of this and ``import_path`` is given.
        import_path: ``my_pkg.my_mod:MyWorkload``, importable from the environment or the current
            folder: a subclass of :class:`Workload` or of ``LightningModule``, or a function whose
            return annotation is one. Importing a module runs it; nothing else in it is called.
        args: Keyword arguments of the workload or of the module.
        data: Import path of the ``LightningDataModule`` of a ``LightningModule``. By default the
            module's own loaders, or else the only data module that its file defines.
        data_args: Keyword arguments of the data module.
        target: Target of a ``LightningModule``.

    Raises:
        ConfigError: There is no such workload, or it refuses its arguments. The key is
            ``workload.name``, ``workload.import``, ``workload.args.NAME``, or one of
            ``workload.data``, ``workload.data_args.NAME`` and ``workload.target``.
    """
    given = dict(args or {})
    of_plain = dict(zip(_OF_PLAIN, (data, data_args, target), strict=True))
    if name is not None and import_path is None:
        entry = WORKLOADS.get(name, key="workload.name")
        _refuse_keys_of_plain(of_plain)
        registered: Workload = entry(**given)
        return registered
    if name is not None or import_path is None:
        value = {"name": name, "import": import_path}
        raise ConfigError(Problem("workload", value, "exactly one of name and import"))
    maker = _find(import_path, IMPORT_KEY, FORM, _bases())
    _bind(maker, given, ARGS_KEY)
    if _makes(maker, (_lightning().LightningModule,)):
        return _plain(maker, import_path, given, data, dict(data_args or {}), target)
    _refuse_keys_of_plain(of_plain)
    return _checked(_made(maker, import_path, given, ARGS_KEY), import_path)


def _lightning() -> Any:
    return importlib.import_module("lightning.pytorch")  # slow, and only plain modules need it


def _bases() -> tuple[type, ...]:
    return (Workload, _lightning().LightningModule)


def _refuse_keys_of_plain(values: Mapping[str, Any]) -> None:
    """Refuse keys that only a plain ``LightningModule`` has."""
    allowed = "absent with a Workload, which has data and a target of its own"
    problems = [Problem(f"workload.{key}", item, allowed) for key, item in values.items() if item]
    if problems:
        raise ConfigError(problems)


def _made(maker: Callable[..., object], path: str, given: dict[str, Any], key: str) -> object:
    try:
        return maker(**given)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's constructor
        raised = f"{type(error).__name__}: {error}{user_line(error)}"
        allowed = f"arguments that {path} accepts; it raised {raised}"
        raise ConfigError(Problem(key, given, allowed)) from error


def _plain(
    maker: Callable[..., object],
    path: str,
    args: dict[str, Any],
    data: str | None,
    data_args: dict[str, Any],
    target: Target | None,
) -> Workload:
    """Return the workload of a plain Lightning module."""
    from lightning.pytorch import LightningDataModule, LightningModule

    from rayhive.workloads.plain.workload import PlainModule

    def make(kind: type[T], maker: Callable[..., object], path: str, key: str) -> Callable[[], T]:
        def call() -> T:
            given = args if kind is LightningModule else data_args
            found = _made(maker, path, given, key)
            if not isinstance(found, kind):
                text = f"a {kind.__name__}, not a {type(found).__name__}"
                raise ConfigError(Problem(key.replace("args", "import"), path, text))
            return found

        return call

    module = make(LightningModule, maker, path, ARGS_KEY)
    returned: Any = maker if inspect.isclass(maker) else get_type_hints(maker)["return"]
    has_loader = returned.train_dataloader is not LightningModule.train_dataloader
    if data is None and not has_loader:
        data = _data_module_beside(path)
    if data is None:
        if data_args:
            allowed = "absent without workload.data; the module has a train_dataloader"
            raise ConfigError(Problem(DATA_ARGS_KEY, data_args, allowed))
        return PlainModule(module, path, target)
    form = "package.module:Attribute, a LightningDataModule or a function annotated to return one"
    data_maker = _find(data, DATA_KEY, form, (LightningDataModule,))
    _bind(data_maker, data_args, DATA_ARGS_KEY)
    make_data = make(LightningDataModule, data_maker, data, DATA_ARGS_KEY)
    return PlainModule(module, path, target, make_data, data)


def _data_module_beside(path: str) -> str:
    """Return the import path of the only data module that the file of a module defines.

    Raises:
        ConfigError: The file defines none, or several.
    """
    name = path.partition(":")[0]
    found = [
        f"{name}:{attribute}"
        for attribute, value in vars(sys.modules[name]).items()
        if inspect.isclass(value)
        and value.__module__ == name
        and issubclass(value, _lightning().LightningDataModule)
    ]
    if len(found) == 1:
        return found[0]
    listed = f"one of {', '.join(found)}" if found else "the import path of a LightningDataModule"
    allowed = f"{listed}; {path} has no train_dataloader"
    raise ConfigError(Problem(DATA_KEY, None, allowed))


def _refused(
    path: str, allowed: str, hint: str | None = None, key: str = IMPORT_KEY
) -> ConfigError:
    return ConfigError(Problem(key, path, allowed, hint))


def _find(path: str, key: str, form: str, bases: tuple[type, ...]) -> Callable[..., object]:
    """Return what an import path names: a subclass of a base, or a function that returns one."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise _refused(path, form, key=key)
    # As with `python -m`: the user's module is beside the study, wherever rayhive is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raised = f"{type(error).__name__}: {error}{user_line(error)}"
        text = f"a module that imports; {module_name}: {raised}"
        raise _refused(path, text, key=key) from error
    offers = sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and _makes(value, bases)
        if not any(value is base for base in (*_BASES, *bases))
    )
    close = nearest(attribute, offers)
    hint = close and f"{module_name}:{close}"
    if not hasattr(module, attribute):
        text = f"an attribute of {module_name}: {', '.join(offers) or 'it has none'}"
        raise _refused(path, text, hint, key)
    found = getattr(module, attribute)
    if not _makes(found, bases):
        raise _refused(path, form, hint, key)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _refused(path, f"a Workload that implements {missing}")
    maker: Callable[..., object] = found
    return maker


def _makes(found: object, bases: tuple[type, ...]) -> bool:
    """Return whether an object is a subclass of a base, or a function annotated to return one.

    Nothing else is called: a study that names ``os:system`` must not run a command.
    """
    if inspect.isclass(found):
        return issubclass(found, bases)
    if not inspect.isfunction(found):
        return False
    try:
        returned = get_type_hints(found).get("return")
    except Exception:  # an annotation may hold an undefined name
        return False
    return inspect.isclass(returned) and issubclass(returned, bases)


def _bind(maker: Callable[..., object], given: Mapping[str, Any], key: str) -> None:
    """Refuse arguments that the signature does not have, and a call without required ones."""
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # without a signature the call itself raises
        return
    kinds = inspect.Parameter
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    problems: list[Problem] = []
    if not any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        problems += [unknown(f"{key}.{x}", x, named) for x in given if x not in named]
    problems += [
        Problem(f"{key}.{name}", None, "required")
        for name, parameter in named.items()
        if parameter.default is kinds.empty and name not in given
    ]
    if problems:
        raise ConfigError(problems)


def _checked(made: object, path: str) -> Workload:
    if not isinstance(made, Workload):
        raise _refused(path, f"{FORM}; it returned a {type(made).__name__}")
    kinds = get_args(DataKind)
    valid = {
        "name, a string": isinstance(getattr(made, "name", None), str),
        "target, a Target or None": isinstance(getattr(made, "target", ""), (Target, NoneType)),
        "default_batch_size, a number of samples": is_whole(
            getattr(made, "default_batch_size", None), 1
        ),
        "data, " + " or ".join(map(repr, kinds)): getattr(made, "data", None) in kinds,
    }
    if missing := [text for text, is_valid in valid.items() if not is_valid]:
        raise _refused(path, f"a Workload with {'; '.join(missing)}")
    return made


def evaluation_problems(given: WorkloadConfig, workload: Workload) -> Iterator[Problem]:
    """Yield the metrics that peers need and a user's workload does not return."""
    if given.import_path is None:
        return
    measured = workload.metrics()
    needed = ["loss"] if workload.target is None else ["loss", workload.target.metric]
    if missing := [name for name in dict.fromkeys(needed) if name not in measured]:
        allowed = f"a workload whose evaluate returns {' and '.join(missing)}; it returns "
        yield Problem("workload.import", given.label, allowed + (", ".join(measured) or "nothing"))
