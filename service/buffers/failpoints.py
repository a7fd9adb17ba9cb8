"""Points within a commit where a test may stop the writer thread, make it fail, or kill the process."""

from __future__ import annotations

from collections.abc import Callable

action: Callable[[str], None] | None = None
"""What a test does at each point; no server ever sets it."""


def hit(point: str) -> None:
    """Call `action` if a test has set it."""
    if action is not None:
        action(point)
