"""Several courses at the same time in one thread, with results in the order of the courses.

A course is a generator that pauses while it waits. Courses begin in their order, as many at a time
as there are places. Results are passed on in the same order, whichever course ends first: what
follows from them, such as the values that Optuna receives, does not depend on the number of places.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class SideBySide(Generic[T]):
    """Runs courses at the same time; as a context manager, ends those under way on an error.

    Args:
        places: Courses that run at the same time.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._under_way: dict[int, Generator[None, None, T]] = {}

    def __enter__(self) -> SideBySide[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._end(error)

    def results(self, courses: Iterable[Generator[None, None, T]]) -> Iterator[T]:
        """Yield the result of each course, in the order of the courses.

        Args:
            courses: The courses. Each is taken when a place is free for it.
        """
        coming = enumerate(courses)
        ended: dict[int, T] = {}
        passed_on = 0
        while True:
            while len(self._under_way) < self._places:
                number, course = next(coming, (-1, None))
                if course is None:
                    break
                self._under_way[number] = course
            if not self._under_way:
                return
            for number, course in list(self._under_way.items()):
                try:
                    next(course)
                except StopIteration as end:
                    del self._under_way[number]
                    ended[number] = end.value
                except BaseException:
                    del self._under_way[number]
                    raise
            while passed_on in ended:
                yield ended.pop(passed_on)
                passed_on += 1

    def _end(self, error: BaseException) -> None:
        """End all courses under way: each is told first, and then each is awaited."""
        courses, self._under_way = list(self._under_way.values()), {}
        told = [each for each in courses if not _is_over(partial(each.throw, error), error)]
        for course in told:
            while not _is_over(partial(next, course), error):
                pass


def _is_over(step: Callable[[], None], error: BaseException) -> bool:
    """Take a step of a course that has to end, and return whether it has.

    Args:
        step: The step.
        error: The error that ends the course, and that it raises at its end. What it raises
            besides is no matter, except for a further interruption.
    """
    try:
        step()
    except BaseException as found:
        if found is not error and not isinstance(found, Exception):
            raise
        return True
    return False
