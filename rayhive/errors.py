"""The errors that rayhive raises on purpose.

Every one of them derives from :class:`RayhiveError` and carries the exit code
that the command line ends with, so that a script can tell bad input (2) from a
run that failed (1).
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
        exit_code: What the command line returns when the error reaches it.
    """

    exit_code: int = 1


#: Characters of a value that a message shows; the middle of a longer one is left out.
SHOWN = 200


def _shown(value: object) -> str:
    """Return ``value`` as a message shows it: on one line, and not much longer than that."""
    try:
        text = without_secrets(repr(value))  # before it is cut
    except (ValueError, RecursionError):  # an integer of thousands of digits has none
        return f"this {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


@dataclass(frozen=True)
class Problem:
    """One mistake in what the user gave.

    Attributes:
        key: Dotted path of the offending key, for example ``space.powersgd_rank``.
        value: What was given there.
        allowed: What is allowed there, in words.
        nearest: The valid choice closest to ``value``, if one is close.
    """

    key: str
    value: object
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest!r}?" if self.nearest is not None else ""
        text = f"{self.key}: {_shown(self.value)} is not valid: {self.allowed}{hint}"
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
        return without_secrets(text)


class ConfigError(RayhiveError):
    """Bad input, found before Ray starts and before anything is written.

    Args:
        problems: Every mistake that was found, not only the first.
        source: Where the input came from (a file name), for the message.
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
    """A replicate ended in a way that its events cannot explain away."""


class DamagedError(RayhiveError):
    """A file of a run that is read back is not what was written.

    Args:
        path: The file.
        reason: What is wrong with it.
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
    """Ray could not be reached, or has no room for the swarm."""


class SupervisorError(ClusterError):
    """The supervisor of a replicate did not start: the replicate is lost, not its study."""


class NoAnswerError(ClusterError):
    """A supervisor that is there does not answer in time: what it runs is not lost."""


#: What stands for a password.
MASK = "***"
# What a variable of the environment stands for is no secret of the text that names it.
_PASSWORD = re.compile(r"((?<![\w+.-])[\w+.-]+://[^\s:@/?'\"]*):(?!\$\{\w+\}@)([^\s?'\"]*)@")
_SECRET_FIELD = re.compile(
    r"([?&][^=&\s]*(?:pass|pwd|secret|token)[^=&\s]*=)(?!\$\{\w+\})([^&\s'\"]+)", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Return ``text`` with the passwords in its URLs masked, also those in their queries."""
    return _SECRET_FIELD.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def described(error: BaseException) -> str:
    """Return an exception with the line of the user's code that it came from, if it did."""
    return f"{error!r}{user_line(error)}"


def user_line(error: BaseException) -> str:
    """Return the line of the user's code that an exception came from, as ``" (FILE, line N)"``.

    That is the innermost line outside of rayhive, installed packages and Python itself; empty if
    there is none.
    """
    frames: list[tuple[str, int | None, str]] = []
    for frame in traceback.extract_tb(error.__traceback__):
        frames.append((frame.filename, frame.lineno, f", in {frame.name}"))
    if isinstance(error, SyntaxError) and error.filename is not None:
        frames.append((error.filename, error.lineno, ""))
    for file, line, where in reversed(frames):
        path = Path(file).resolve()
        if path.is_file() and not any(path.is_relative_to(place) for place in _not_the_users()):
            here = Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            return f" ({shown}, line {line}{where})"
    return ""


@functools.cache
def _not_the_users() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(place.resolve() for place in (*installed, Path(__file__).parent))


def nearest(value: object, choices: Sequence[str]) -> str | None:
    """Return the choice that is spelled most like ``value``, or None if none is close."""
    text = value if isinstance(value, str) else _shown(value)
    found = difflib.get_close_matches(text[:SHOWN], choices, n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(key: str, value: object, choices: Iterable[str]) -> Problem:
    """Describe a name that is not among ``choices``."""
    names = sorted(choices)
    return Problem(key, value, f"one of {', '.join(names) or 'none'}", nearest(value, names))
