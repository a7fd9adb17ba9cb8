"""The pushes of a worker: one at a time, each with a key of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from gradserve_client._http.log import logger
from gradserve_client._http.placement import RETRYABLE
from gradserve_client._runs import unheard
from gradserve_client._runs.member import Member
from gradserve_client._runs.outcomes import Pushed
from gradserve_client._runs.sums import Sums
from gradserve_client.errors import KeyReused, StaleStep, explained
from gradserve_client.rows import Sent


class Pushes:
    """The pushes of a worker in its step. A worker without a name gets a random one."""

    def __init__(self, sums: Sums, member: Member, worker: str | None, step: int, new_run: str) -> None:
        self._sums, self._member, self._worker, self._new_run = sums, member, worker, new_run
        self._name = worker or uuid.uuid4().hex
        self._push: Callable[[], Pushed] | None = None
        self._future: Future[Pushed] | None = None
        self._ticket = object()
        self._tried = False
        self.begin(step)

    def begin(self, step: int, count: int = 0, *, again: bool = False) -> None:
        """Go on after this many pushes in this step. After a restart the worker may make some `again`."""
        self.step, self.count = step, count
        self._again = again
        self.doubt: str | None = None
        """What may be wrong with the name of this worker, as a sentence."""

    def add(self, numbers: Mapping[str, Sent], used: set[str], *, weight: float, scale: float) -> Pushed:
        """Make the next push. Raises `StaleStep`, and `KeyReused` for a push that counts already."""
        is_first, self._tried = not (self._again or self._tried), True
        try:
            receipts = self._sums.add(
                numbers,
                used,
                weight=weight,
                scale=scale,
                step=self.step,
                key=f"{self._sums.identity(self._name)}-{self.step}-{self.count}",
                contributor=self._worker,
            )
        except StaleStep as error:
            self._member.again()  # so that the running step waits for this worker
            fate = "count on some of the servers only" if error.maybe_done else "do not count"
            pulls = "if it has closed, pull() fetches its mean; " if self._sums.closes_itself else ""
            raise explained(
                error,
                f"This worker is at step {self.step}, and its gradients {fate}; {pulls}catch_up() goes on in the"
                " running step",
            ) from None
        except KeyReused as error:
            push = f"push {self.count} of step {self.step}"
            self._made()
            self._member.again()  # raises if another process has taken its place
            raise explained(
                error,
                f"This worker made {push} before, with another gradient or weight, and that push counts; or another"
                f" worker has the same name. If an earlier job made it: {self._new_run}",
            ) from None
        pushed = Pushed.of(receipts)
        if pushed.replayed and is_first:
            self.doubt = (
                f"The server has push {self.count} of step {self.step} of {self._name!r} from an earlier request: if"
                " this worker was not restarted, another worker may have the same name"
            )
            logger.warning("%s", self.doubt)
        self._made()
        return pushed

    def _made(self) -> None:
        self.count, self._tried = self.count + 1, False

    def start(self, push: Callable[[], Pushed]) -> None:
        """Make the push in a thread. Python waits for the thread before it exits, and says if the push has failed."""
        thread = ThreadPoolExecutor(1, "gradserve push")
        self._push = push
        self._future = thread.submit(unheard.made, push, self._ticket, f"Push {self.count} of step {self.step}")
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
        finally:
            unheard.heard(self._ticket)
            del future  # the error's traceback holds this frame: a cycle that would keep the numbers in memory
        self._push = None
