"""The synchronous client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from gradserve_client._http.channels import channel
from gradserve_client._http.placement import Placement
from gradserve_client._http.policy import Timeouts
from gradserve_client._http.requests import Requests
from gradserve_client._http.runner import Runner
from gradserve_client._http.shards import Shard, Shards
from gradserve_client._wire import calls
from gradserve_client._wire.calls import Adding, Input, Into
from gradserve_client._wire.specs import Reduce
from gradserve_client._wire.tensors import Array
from gradserve_client.buffers import Buffers
from gradserve_client.errors import GradserveError
from gradserve_client.graphs import Graphs
from gradserve_client.models import OperatorInfo, Receipt
from gradserve_client.ops import Ops
from gradserve_client.runs import Runs


class Client:
    """A connection to a server. Threads may share it.

    `url` and `api_key` default to the environment's GRADSERVE_URL and GRADSERVE_API_KEY, and then to
    http://127.0.0.1:8000 and no key. `unix:/path` and `http+unix://%2Fpath` name the UNIX socket of a server on this
    machine. With a list of URLs, the buffers are spread over these servers by their names, and operators run on any of
    them; docs/scaling.md says what does not hold across servers.

    The client retries a call when the connection fails, when nothing comes for `attempt_timeout` seconds, and when the
    server is busy or away. It gives up after `timeout` seconds, or after `max_retries` retries. The time that a call
    waits for a step does not count. All attempts of a change have the same idempotency key, so it counts once.

    `transport` replaces the connections to the server, as with `httpx.HTTPTransport(verify=..., proxy=...)`.

    >>> from gradserve_client import Client
    >>> with Client(url) as server:
    ...     server.ops.relu_grad([1, 2], [0.5, -1])
    array([1., 0.], dtype=float32)
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        attempt_timeout: float = 20.0,
        max_retries: int | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        urls = [url] if url is None or isinstance(url, str) else url
        servers = [Requests(one, api_key) for one in urls]
        self._placement = Placement([one.address.text for one in servers])
        self._requests = servers[0]
        timeouts = Timeouts(timeout, attempt_timeout, max_retries)
        if len(servers) == 1:
            self._runner = Runner(self._requests, timeouts, channel(self._requests, transport))
        else:
            shards = [Shard(one, timeouts, channel(one, transport)) for one in servers]
            self._runner = Shards(shards, self._placement)
        self.ops = Ops(self._runner)
        """The operators, a method each."""
        self.buffers = Buffers(self._runner)
        """The buffers, by name."""
        self.graphs = Graphs(self._runner)
        """The graphs, by name: models that live on the server."""
        self.runs = Runs(self._runner)
        """The runs, by name: what the workers of a training have in common."""

    def __repr__(self) -> str:
        places = [shard.place_of("") for shard in self._runner.shards]
        return f"{type(self).__name__}({places[0] if len(places) == 1 else places!r})"

    @property
    def url(self) -> str:
        """The server's URL, or the first of several."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all servers."""
        return self._placement.urls

    def run(
        self,
        op: str,
        tensors: Mapping[str, Input],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        into: Mapping[str, Into] | None = None,
        set: Mapping[str, Into] | None = None,
        reduce: Reduce | None = None,
        timeout: float = 0.0,
        **add: Unpack[Adding],
    ) -> dict[str, Array | Receipt]:
        """Run an operator by its ONNX name, and return its outputs by name.

        Lists get the dtype that the operator's method in `ops` names first, mostly float32. `outputs` names the outputs
        to compute. `into` maps outputs to buffers: the server adds `weight` times the output to the buffer, and the
        receipt takes the output's place. With `step`, it adds only while the buffer is in that step. The step lists
        the `contributor`.

        `set` maps outputs to buffers that they replace, all or none, and only if no input from a buffer has changed
        meanwhile. The buffers "m.p.*" are a group. As an input, `server.buffers["m.g.*@16"]` is what step 16 of them
        closed with: with `reduce="mean"` the means, after a wait of up to `timeout` seconds.

        >>> server.run("LeakyReluGrad", {"dY": [1, 2], "Y": [3, -4]}, {"alpha": 0.5})
        {'dX': array([1., 1.], dtype=float32)}
        """
        return self._runner.run(
            calls.run(
                op,
                tensors,
                attributes or {},
                outputs=outputs,
                into=into,
                set=set,
                reduce=reduce,
                timeout=timeout,
                **add,
            )
        )

    def operators(self) -> list[OperatorInfo]:
        """Return the operators of the server.

        >>> next(operator.formula for operator in server.operators() if operator.name == "TanhGrad")
        'dX = dY * (1 - Y * Y).'
        """
        return self._runner.run(calls.operators())

    def places(self, prefix: str = "") -> dict[str, str]:
        """Return the URL of the server of each buffer whose name begins with `prefix`, as all servers list them.

        >>> set(server.places("layer1.").values()) == {server.url}
        True
        """
        places: dict[str, str] = {}
        for url, shard in zip(self.urls, map(Buffers, self._runner.shards), strict=True):
            for info in shard.list(prefix):
                places[info.name] = url
        return places

    def place(self, places: Mapping[str, str]) -> None:
        """Put buffers on the servers of these URLs, in place of those that follow from their names.

        This client then finds them there; other clients need the same call. Raises `InvalidInput` for a URL that is not
        among `urls`.

        >>> server.place(server.places())
        """
        self._placement.place(places)

    def is_ready(self) -> bool:
        """Whether every server takes requests. The client asks once, without retries.

        >>> server.is_ready()
        True
        """
        self._requests.check_open()
        for shard in self._runner.shards:
            try:
                shard.run(calls.ready())
            except GradserveError:
                return False
        return True

    def close(self) -> None:
        """Close the connections. The client takes no calls after it."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
