"""The pushes of a worker: one at a time, each with a key of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from gradserve_client._http.placement import RETRYABLE
from gradserve_client._runs.sums import Sums, explained
from gradserve_client.errors import KeyReused, StaleEpoch
from gradserve_client.models import Pushed
from gradserve_client.rows import Gradient


class Pushes:
    """The pushes of a worker in its epoch. A worker without a name gets a random one."""

    def __init__(self, sums: Sums, worker: str | None, epoch: int) -> None:
        self._sums, self._worker = sums, worker
        self._name = worker or uuid.uuid4().hex
        self._push: Callable[[], Pushed] | None = None
        self._future: Future[Pushed] | None = None
        self.begin(epoch)

    def begin(self, epoch: int, count: int = 0) -> None:
        """Go on after this many pushes in this epoch."""
        self.epoch, self.count = epoch, count

    def add(self, numbers: Mapping[str, Gradient], used: set[str], *, weight: float, scale: float) -> Pushed:
        """Make the next push. Raises `StaleEpoch`, and `KeyReused` for a push that counts already."""
        try:
            receipts = self._sums.add(
                numbers,
                used,
                weight=weight,
                scale=scale,
                epoch=self.epoch,
                key=f"{self._sums.identity(self._name)}-{self.epoch}-{self.count}",
                contributor=self._worker,
            )
        except StaleEpoch as error:
            hint = "; if it has closed, pull() fetches its mean" if self._sums.closes_itself else ""
            raise explained(
                error, f"This worker is at epoch {self.epoch}, and its gradients do not count{hint}"
            ) from None
        except KeyReused as error:
            push = f"push {self.count} of epoch {self.epoch}"
            self.count += 1
            raise explained(
                error,
                f"This worker made {push} before, with another gradient or weight, and that push counts; or another"
                " worker has the same name",
            ) from None
        self.count += 1
        return Pushed.of(receipts)

    def start(self, push: Callable[[], Pushed]) -> None:
        """Make the push in a thread. Python waits for the thread before it exits."""
        thread = ThreadPoolExecutor(1, "gradserve push")
        self._push, self._future = push, thread.submit(push)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the push in the thread, or send it again after an error. Raises its error.

        A push that cannot succeed later is forgotten.
        """
        if self._push is None:
            return
        future, self._future = self._future, None
        try:
            if future is None:
                self._push()
            else:
                future.result()
        except RETRYABLE:
            raise
        except BaseException:
            self._push = None
            raise
        finally:  # the error's traceback holds this frame: a cycle that would keep the numbers in memory
            del future
        self._push = None
