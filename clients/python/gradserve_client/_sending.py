"""A push on its way while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Sending(Generic[T]):
    """Calls `send` in a thread. Python waits for the thread before it exits, so no push is lost without an error."""

    def __init__(self, send: Callable[[], T]) -> None:
        self._send = send
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name="gradserve push")
        self._thread.start()

    def _work(self) -> None:
        try:
            self._results.append(self._send())
        except BaseException as error:
            self._errors.append(error)

    def result(self) -> T:
        """Return the result, once it is there, or raise the error of the thread. After an error, call `send` again."""
        if self._thread is None:
            return self._send()
        self._thread.join()
        if self._errors:
            self._thread = None
            raise self._errors.pop()
        return self._results[0]
