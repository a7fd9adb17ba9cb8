"""Points before and within a commit where a test may stop the process or its writer thread, or make either fail."""

from __future__ import annotations

from collections.abc import Callable

action: Callable[[str], None] | None = None
"""The function that a test runs at each point. No server sets it."""


def hit(point: str) -> None:
    """Call `action` if a test has set it."""
    if action is not None:
        action(point)
