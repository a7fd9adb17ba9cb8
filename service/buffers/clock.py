"""The clock of a store. It only runs on: setting the machine's clock moves no age and no deadline."""

from __future__ import annotations

import time
from pathlib import Path

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux's clock that also counts while the machine sleeps; elsewhere the monotonic clock."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux names the run of the machine. Other systems have no such file."""


def boot() -> bytes:
    """Return the name of this run of the machine, whose processes share a monotonic clock; b"" if it is unknown."""
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return b""


def machine_time() -> float:
    """Return the machine's time in seconds since 1970, which may be wrong, and may be set."""
    return time.time()


class Clock:
    """Seconds since 1970, as the monotonic clock moves them on, which they are `offset` seconds ahead of."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    @classmethod
    def starting(cls, earliest: float = 0.0) -> Clock:
        """Return a clock that starts at the machine's time, or at `earliest` if that is later."""
        return cls(max(earliest, machine_time()) - time.clock_gettime(_SINCE_BOOT))

    def __call__(self) -> float:
        return self.offset + time.clock_gettime(_SINCE_BOOT)
