"""Pools of threads for kernels, and patience with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from service.kernels import Workspace, workspace

PATIENCE = 60
"""Seconds: long enough that the machine is never too slow, and short enough that a deadlock fails soon."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Kernels called inside have a pool of `count` threads. At most `count` threads work, with the caller's."""
    with ThreadPoolExecutor(count) as pool, workspace(Workspace(pool, count)):
        yield
