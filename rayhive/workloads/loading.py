"""Construction of a workload from its registered name or from an import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

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
    if name is not None and import_path is None:
        registered: Workload = WORKLOADS.get(name, key="workload.name")(**given)
        return registered
    if name is not None or import_path is None:
        value = {"name": name, "import": import_path}
        raise ConfigError(Problem("workload", value, "exactly one of name and import"))
    maker = _find(import_path)
    _bind(maker, given)
    try:
        made = maker(**given)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's constructor
        raised = f"{type(error).__name__}: {error}{user_line(error)}"
        allowed = f"arguments that {import_path} accepts; it raised {raised}"
        raise ConfigError(Problem(ARGS_KEY, given, allowed)) from error
    return _checked(made, import_path)


def _refused(path: str, allowed: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Problem(IMPORT_KEY, path, allowed, hint))


def _find(path: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise _refused(path, FORM)
    # As with `python -m`: the user's module is beside the study, wherever rayhive is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raised = f"{type(error).__name__}: {error}{user_line(error)}"
        raise _refused(path, f"a module that imports; {module_name}: {raised}") from error
    offers = sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and value not in _BASES and _makes_workload(value)
    )
    close = nearest(attribute, offers)
    hint = close and f"{module_name}:{close}"
    if not hasattr(module, attribute):
        text = f"an attribute of {module_name}: {', '.join(offers) or 'it has none'}"
        raise _refused(path, text, hint)
    found = getattr(module, attribute)
    if not _makes_workload(found):
        text = FORM
        if inspect.isclass(found) and any(b.__name__ == "LightningModule" for b in found.__mro__):
            text += "; a LightningModule has no target: a Workload of yours returns it"
        raise _refused(path, text, hint)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _refused(path, f"a Workload that implements {missing}")
    maker: Callable[..., object] = found
    return maker


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


def _checked(made: object, path: str) -> Workload:
    if not isinstance(made, Workload):
        raise _refused(path, f"{FORM}; it returned a {type(made).__name__}")
    kinds = get_args(DataKind)
    valid = {
        "name, a string": isinstance(getattr(made, "name", None), str),
        "target, a Target": isinstance(getattr(made, "target", None), Target),
        "default_batch_size, a number of samples": isinstance(
            getattr(made, "default_batch_size", None), int
        ),
        "data, " + " or ".join(map(repr, kinds)): getattr(made, "data", None) in kinds,
    }
    if missing := [text for text, is_valid in valid.items() if not is_valid]:
        raise _refused(path, f"a Workload with {'; '.join(missing)}")
    return made
