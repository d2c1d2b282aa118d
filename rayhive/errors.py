"""Errors that rayhive raises deliberately.

All of them derive from :class:`RayhiveError` and have the exit code of the command line, so that a
script can distinguish bad input (2) from a failed run (1).
"""

from __future__ import annotations

import difflib
import functools
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class RayhiveError(Exception):
    """Root of rayhive's own errors.

    Attributes:
        exit_code: Exit code of the command line when the error reaches it.
    """

    exit_code: int = 1


#: Largest number of characters of a value or a name in a message; the middle of a longer one
#: is left out.
SHOWN = 200


def _shown(value: object) -> str:
    """Return ``value`` as text for a message, on one line and shortened to about ``SHOWN``."""
    try:
        text = without_secrets(repr(value))  # before it is shortened
    except (ValueError, RecursionError):  # an integer of thousands of digits has no repr
        return f"this {type(value).__name__}"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


@dataclass(frozen=True)
class Problem:
    """One mistake in the user's input.

    Attributes:
        key: Dotted path of the wrong key, for example ``space.powersgd_rank``.
        value: The given value.
        allowed: Description of the allowed values.
        nearest: The allowed value closest to ``value``; None if none is close.
    """

    key: str
    value: object
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {_shown(self.nearest)}?" if self.nearest is not None else ""
        text = f"{_shortened(self.key)}: {_shown(self.value)} is not valid: {self.allowed}{hint}"
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
        return without_secrets(text)


class ConfigError(RayhiveError):
    """Bad input, found before Ray starts and before anything is written.

    Args:
        problems: Every mistake that was found.
        source: Name of the input, such as a file name, for the message.
    """

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem], source: str | None = None) -> None:
        self.problems: tuple[Problem, ...] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if self.source is None and len(lines) == 1:
            return lines[0]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        head = f"{count} in {self.source}:" if self.source else f"{count}:"
        return "\n".join([head, *(f"  - {line}" for line in lines)])


class ReplicateError(RayhiveError):
    """A replicate cannot run or continue."""


class DamagedError(RayhiveError):
    """A stored file of a run is damaged.

    Args:
        path: The file.
        reason: Description of the damage.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}{reason if reason.startswith(',') else f': {reason}'}")
        self.path = Path(path)
        self.reason = reason


class NewerVersionError(RayhiveError):
    """A stored file was written by a newer rayhive, with a schema that this one cannot read.

    Args:
        what: The file.
        found: Version of its schema.
        known: Newest version that can be read.
    """

    def __init__(self, what: str, found: int, known: int) -> None:
        super().__init__(
            f"{what}: event schema version {found} is newer than {known}, the newest that this "
            "rayhive reads: read it with the rayhive that wrote it, or a newer one"
        )
        self.found, self.known = found, known


class PeerError(RayhiveError):
    """A peer process failed or could not be started."""


class ClusterError(RayhiveError):
    """Ray cannot be reached, refuses a request, or has no room for the swarm."""


class SupervisorError(ClusterError):
    """The supervisor of a replicate did not start; the study goes on."""


class NoAnswerError(ClusterError):
    """A living supervisor does not answer in time; its replicate is not lost."""


#: Replacement for a password.
MASK = "***"
# A reference to a variable of the environment, ``${NAME}``, is not a secret.
_PASSWORD = re.compile(r"((?<![\w+.-])[\w+.-]+://[^\s:@/?'\"]*):(?!\$\{\w+\}@)([^\s?'\"]*)@")
_SECRET_FIELD = re.compile(
    r"([?&][^=&\s]*(?:pass|pwd|secret|token)[^=&\s]*=)(?!\$\{\w+\})([^&\s'\"]+)", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Return ``text`` with the passwords in its URLs masked, those in queries included."""
    return _SECRET_FIELD.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def described(error: BaseException) -> str:
    """Return the text of an exception, with the line of the user's code that raised it, if any."""
    return f"{error!r}{user_line(error)}"


def user_line(error: BaseException) -> str:
    """Return the line of the user's code that an exception came from, as ``" (FILE, line N)"``.

    It is the innermost line outside rayhive, the installed packages and Python itself. The text is
    empty if there is no such line.
    """
    frames: list[tuple[str, int | None, str]] = []
    for frame in traceback.extract_tb(error.__traceback__):
        frames.append((frame.filename, frame.lineno, f", in {frame.name}"))
    if isinstance(error, SyntaxError) and error.filename is not None:
        frames.append((error.filename, error.lineno, ""))
    for file, line, where in reversed(frames):
        path = Path(file).resolve()
        if path.is_file() and not any(path.is_relative_to(place) for place in installed_folders()):
            here = Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            return f" ({shown}, line {line}{where})"
    return ""


@functools.cache
def installed_folders() -> tuple[Path, ...]:
    """Return the folders of Python, of the installed packages and of rayhive."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(place.resolve() for place in (*installed, Path(__file__).parent))


def nearest(value: object, choices: Sequence[str]) -> str | None:
    """Return the choice with the spelling closest to ``value``; None if none is close."""
    text = value if isinstance(value, str) else _shown(value)
    found = difflib.get_close_matches(text[:SHOWN], choices, n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(key: str, value: object, choices: Iterable[str]) -> Problem:
    """Return the problem of a name that is not among ``choices``."""
    names = sorted(choices)
    listed = ", ".join(map(_shortened, names)) or "none"
    return Problem(key, value, f"one of {listed}", nearest(value, names))
