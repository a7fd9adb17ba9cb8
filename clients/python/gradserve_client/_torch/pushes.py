"""The pushes of a worker: one at a time, each with a key of its own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from gradserve_client._http.placement import RETRYABLE
from gradserve_client._torch.sums import Sums, explained
from gradserve_client.errors import KeyReused, StaleEpoch
from gradserve_client.models import Pushed
from gradserve_client.rows import Gradient

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


class Pushes:
    """The pushes of a worker in its epoch. A worker without a name gets a random one."""

    def __init__(self, sums: Sums, worker: str | None, epoch: int) -> None:
        self._sums, self._worker = sums, worker
        self._name = worker or uuid.uuid4().hex
        self._sending: Sending[Pushed] | None = None
        self.begin(epoch)

    def begin(self, epoch: int, made: int = 0) -> None:
        """Go on after this many pushes in this epoch."""
        self.epoch, self.made = epoch, made

    def add(self, numbers: Mapping[str, Gradient], used: set[str], *, weight: float, scale: float) -> Pushed:
        """Make the next push. Raises `StaleEpoch`, and `KeyReused` for a push that counts already."""
        try:
            receipts = self._sums.add(
                numbers,
                used,
                weight=weight,
                scale=scale,
                epoch=self.epoch,
                key=f"{self._sums.identity(self._name)}-{self.epoch}-{self.made}",
                contributor=self._worker,
            )
        except StaleEpoch as error:
            hint = "; if it has closed, pull() fetches its mean" if self._sums.closes_itself else ""
            raise explained(
                error, f"This worker is at epoch {self.epoch}, and its gradients do not count{hint}"
            ) from None
        except KeyReused as error:
            push = f"push {self.made} of epoch {self.epoch}"
            self.made += 1
            raise explained(
                error,
                f"This worker made {push} before, with another gradient or weight, and that push counts; or another"
                " worker has the same name",
            ) from None
        self.made += 1
        return Pushed.of(receipts)

    def start(self, push: Callable[[], Pushed]) -> None:
        """Make the push in a thread."""
        self._sending = Sending(push)

    def settle(self) -> None:
        """Wait for the push in the thread. Raises its error, and forgets a push that cannot succeed later."""
        if self._sending is None:
            return
        try:
            self._sending.result()
        except RETRYABLE:
            raise
        except BaseException:
            self._sending = None
            raise
        self._sending = None
