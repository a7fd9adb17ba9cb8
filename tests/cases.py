"""Cases of one test in a loop: a test for each case costs ten times as much as a short case does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Name the case in the report of a failure in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise
