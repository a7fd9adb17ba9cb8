"""The operators for `await`: those of `Ops` over a runner whose calls are awaited. `ops.pyi` has their types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradserve_client.ops import Ops


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def operator(*args: Any, **named: Any) -> Any:
        return await method(*args, **named)

    return operator


class AsyncOps(Ops):
    """The operators of a server, for `await`. They take arrays of any kind, and return NumPy arrays."""


for _name, _method in vars(Ops).items():
    if not _name.startswith("_"):
        setattr(AsyncOps, _name, _awaited(_method))
