"""Construction of a workload from its registered name or from an import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast, get_args, get_type_hints

from rayhive.errors import ConfigError, Problem, nearest, unknown, user_line
from rayhive.registry import WORKLOADS
from rayhive.workloads.base import DataKind, Target, Workload
from rayhive.workloads.data import IndexedWorkload

IMPORT_KEY = "workload.import"
ARGS_KEY = "workload.args"
_BASES = (Workload, IndexedWorkload)
FORM = "package.module:Attribute, a Workload subclass or a function annotated to return one"


def load_workload(
    name: str | None, import_path: str | None = None, args: Mapping[str, Any] | None = None
) -> Workload:
    """Return the workload of a study.

    Args:
        name: A registered name; exactly one of this and ``import_path`` is given.
        import_path: ``my_pkg.my_mod:MyWorkload``, importable from the environment or the current
            folder: a subclass of :class:`Workload`, or a function whose return annotation is one.
            Importing a module runs it; nothing else in it is called.
        args: Keyword arguments of the workload.

    Raises:
        ConfigError: There is no such workload, or it refuses its arguments. The key is
            ``workload.name``, ``workload.import`` or ``workload.args.NAME``.
    """
    given = dict(args or {})
    if (name is None) == (import_path is None):
        value = {"name": name, "import": import_path}
        raise ConfigError(Problem("workload", value, "exactly one of name and import"))
    if import_path is None:
        maker = WORKLOADS.get(cast(str, name), key="workload.name")
        return cast(Workload, maker(**given))
    made = _make(_find(import_path), import_path, given)
    _check(made, import_path)
    return cast(Workload, made)


def _find(path: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(Problem(IMPORT_KEY, path, FORM))
    # As with `python -m`: the user's module is beside the study, wherever rayhive is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(Problem(IMPORT_KEY, path, FORM))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        allowed = f"a module that imports; {module_name}: {type(error).__name__}: {error}"
        allowed += user_line(error)
        raise ConfigError(Problem(IMPORT_KEY, path, allowed)) from error
    if not hasattr(module, attribute):
        allowed = f"an attribute of {module_name}: {', '.join(_offers(module)) or 'it has none'}"
        raise ConfigError(Problem(IMPORT_KEY, path, allowed, _nearest(module, attribute)))
    found = getattr(module, attribute)
    if not _makes_workload(found):
        allowed = FORM
        if inspect.isclass(found) and any(b.__name__ == "LightningModule" for b in found.__mro__):
            allowed += "; a LightningModule has no target: a Workload of yours returns it"
        raise ConfigError(Problem(IMPORT_KEY, path, allowed, _nearest(module, attribute)))
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(Problem(IMPORT_KEY, path, f"a Workload that implements {missing}"))
    return cast(Callable[..., object], found)


def _makes_workload(found: object) -> bool:
    """Return whether an object is a Workload class or a function annotated to return one.

    Nothing else is called: a study that names ``os:system`` must not run a command.
    """
    if inspect.isclass(found):
        return issubclass(found, Workload)
    if not inspect.isfunction(found):
        return False
    try:
        returned = get_type_hints(found).get("return")
    except Exception:  # an annotation may hold an undefined name
        return False
    return inspect.isclass(returned) and issubclass(returned, Workload)


def _offers(module: ModuleType) -> list[str]:
    """Return the public names of the workloads in ``module``."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and value not in _BASES and _makes_workload(value)
    )


def _nearest(module: ModuleType, attribute: str) -> str | None:
    hint = nearest(attribute, _offers(module))
    return hint and f"{module.__name__}:{hint}"


def _make(maker: Callable[..., object], path: str, given: dict[str, Any]) -> object:
    _bind(maker, given)
    try:
        return maker(**given)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's constructor
        allowed = f"arguments that {path} accepts; it raised {type(error).__name__}: {error}"
        allowed += user_line(error)
        raise ConfigError(Problem(ARGS_KEY, given, allowed)) from error


def _bind(maker: Callable[..., object], given: Mapping[str, Any]) -> None:
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
        problems += [unknown(f"{ARGS_KEY}.{x}", x, named) for x in given if x not in named]
    problems += [
        Problem(f"{ARGS_KEY}.{name}", None, "required")
        for name, parameter in named.items()
        if parameter.default is kinds.empty and name not in given
    ]
    if problems:
        raise ConfigError(problems)


def _check(made: object, path: str) -> None:
    if not isinstance(made, Workload):
        raise ConfigError(Problem(IMPORT_KEY, path, f"{FORM}; it returned a {type(made).__name__}"))
    wanted: list[str] = []
    if not isinstance(getattr(made, "name", None), str):
        wanted.append("name, a string")
    if not isinstance(getattr(made, "target", None), Target):
        wanted.append("target, a Target")
    if not isinstance(getattr(made, "default_batch_size", None), int):
        wanted.append("default_batch_size, a number of samples")
    if getattr(made, "data", None) not in get_args(DataKind):
        wanted.append("data, " + " or ".join(repr(kind) for kind in get_args(DataKind)))
    if wanted:
        raise ConfigError(Problem(IMPORT_KEY, path, f"a Workload with {'; '.join(wanted)}"))
