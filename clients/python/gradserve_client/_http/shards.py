"""Several servers as if they were one: a call goes to all servers that it is for, at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from gradserve_client._http.parallel import together
from gradserve_client._http.placement import Placement, merged
from gradserve_client._http.policy import Call
from gradserve_client._http.runner import Runner
from gradserve_client.errors import GradserveError

T = TypeVar("T")


class Shard(Runner):
    """Runs calls on one of several servers. Its errors name the server's URL."""

    def run(self, call: Call[T]) -> T:
        """Return the result of the call. Raises `GradserveError`."""
        self._requests.check_open()
        try:
            return super().run(call)
        except GradserveError as error:
            error.detail = f"{self._requests.address.text}: {error.detail}"
            error.args = (error.detail,)
            raise


class Shards(Runner):
    """Runs calls on several servers. Each server retries its part of a call by itself, with its own key."""

    def __init__(self, shards: Sequence[Shard], placement: Placement) -> None:
        self._shards, self._placement = tuple(shards), placement

    @property
    def shards(self) -> tuple[Runner, ...]:
        """The runners of the servers."""
        return self._shards

    def place_of(self, buffer: str) -> str:
        """Return the URL of the buffer's server."""
        return self._shards[self._placement.server_of(buffer)].place_of(buffer)

    def routes(self, call: Call[T]) -> list[tuple[Runner, Call[T]]]:
        """Return the runners of the servers that a call is for, each with its part of the call."""
        return [(self._shards[number], part) for number, part in self._placement.routes(call)]

    def run(self, call: Call[T]) -> T:
        """Return the merged results of the call's parts. Raises `GradserveError` after all parts have ended."""
        return merged(call, together([partial(shard.run, part) for shard, part in self.routes(call)]))

    def close(self) -> None:
        """Close the connections, and refuse further calls."""
        for shard in self._shards:
            shard.close()
