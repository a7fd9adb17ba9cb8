"""The named accumulation buffers of a server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt

from gradserve_client import _buffer_calls
from gradserve_client._buffer_calls import Reduce
from gradserve_client._tensors import Array, TensorLike
from gradserve_client.models import BufferInfo, BufferName, Receipt, Taken

if TYPE_CHECKING:
    from gradserve_client.client import Client


class Buffers:
    """All buffers: `server.buffers["emb.weight"]` is one, and the methods are for many at once, all or none.

    Those that say `names` also take `prefix` in its place: all buffers whose names begin so.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    __iter__ = None  # without it and the next, Python would ask __getitem__ for 0, 1, 2 and so on, for ever
    __contains__ = None

    def __getitem__(self, name: str) -> Buffer:
        """The buffer of this name, whether it is there or not: 1 to 200 of the characters A-Z a-z 0-9 . _ : -"""
        return Buffer(self._client, name)

    def list(self, prefix: str = "") -> list[BufferInfo]:
        """The buffers whose names begin with `prefix`, in the order of their names.

        >>> [one.name for one in server.buffers.list("layer1.")]
        ['layer1.bias', 'layer1.weight']
        """
        found: list[BufferInfo] = []
        cursor: str | None = ""
        while cursor is not None:
            page, cursor = self._client._run(_buffer_calls.page(prefix, cursor))
            found += page
        return found

    def accumulate(
        self,
        gradients: Mapping[str, TensorLike],
        *,
        weight: float = 1.0,
        epoch: int | None = None,
        overwrite: bool = False,
        do_update: bool = True,
        idempotency_key: str | None = None,
    ) -> dict[str, Receipt]:
        """Add `weight` times each gradient to the buffer of its name, in one request; see `Buffer.accumulate`.

        >>> receipts = server.buffers.accumulate({"w1": [[1, 2]], "w2": [3]}, weight=32)
        >>> receipts["w1"].count, receipts["w1"].weight
        (1, 32.0)
        """
        return self._client._run(
            _buffer_calls.accumulate_many(
                gradients,
                weight=weight,
                epoch=epoch,
                overwrite=overwrite,
                do_update=do_update,
                idempotency_key=idempotency_key,
            )
        )

    def value(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        epoch: int | None = None,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        timeout: float = 0.0,
    ) -> dict[str, Array]:
        """The values by name, all of one moment; see `Buffer.value`.

        >>> server.buffers.value(["w1", "w2"])
        {'w1': array([[0., 0.]], dtype=float32), 'w2': array([0.], dtype=float32)}
        """
        return self._client._run(
            _buffer_calls.value_many(names, prefix, epoch=epoch, reduce=reduce, dtype=dtype, timeout=timeout)
        )

    def take(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        min_count: int = 0,
        epoch: int | None = None,
        timeout: float = 0.0,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Taken]:
        """Close the epochs, and have the receipts with the values by name; see `Buffer.take`.

        >>> sorted(server.buffers.take(prefix="layer1."))
        ['layer1.bias', 'layer1.weight']
        """
        return self._client._run(
            _buffer_calls.take_many(
                names,
                prefix,
                min_count=min_count,
                epoch=epoch,
                timeout=timeout,
                reduce=reduce,
                dtype=dtype,
                idempotency_key=idempotency_key,
            )
        )

    def zero(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Receipt]:
        """Discard the sums, and begin the next epochs; see `Buffer.zero`.

        >>> server.buffers.zero(["w1"])["w1"].epoch
        1
        """
        return self._client._run(_buffer_calls.zero_many(names, prefix, idempotency_key=idempotency_key))


class Buffer(BufferName):
    """A buffer: a sum with a name, a count and a weight. It may stand where an operator takes a tensor."""

    def __init__(self, client: Client, name: str) -> None:
        super().__init__(name)
        self._client = client

    def create(
        self,
        shape: Sequence[int] | int,
        *,
        dtype: npt.DTypeLike = "float32",
        quorum: int | None = None,
        keep: int = 1,
        nonfinite: str = "allow",
        ttl_seconds: float | None = None,
        exist_ok: bool = True,
        idempotency_key: str | None = None,
    ) -> BufferInfo:
        """Create it, with zeros. If it is there already and like this, nothing happens, unless `exist_ok` is False.

        `dtype` is float16, bfloat16, float32 or float64. With a `quorum` the add that makes the count reach it closes
        the epoch. Of the closed epochs the last `keep` can be read. With nonfinite="reject" an add that would make the
        sum infinite or NaN is refused. `ttl_seconds` after its last change the buffer is gone.

        Raises `Conflict` if it is there and differs, `PreconditionFailed` if it is there and must not be,
        `TooManyBuffers`, and `InvalidInput`.

        >>> server.buffers["emb.weight"].create((30000, 256), quorum=8).bytes
        30720000
        """
        return self._client._run(
            _buffer_calls.create(
                self.name,
                shape,
                dtype=dtype,
                quorum=quorum,
                keep=keep,
                nonfinite=nonfinite,
                ttl_seconds=ttl_seconds,
                exist_ok=exist_ok,
                idempotency_key=idempotency_key,
            )
        )

    def info(self) -> BufferInfo:
        """All about it but its value. Raises `NotFound`.

        >>> server.buffers["w1"].info().shape
        (1, 2)
        """
        return self._client._run(_buffer_calls.info(self.name))

    def accumulate(
        self,
        gradient: TensorLike,
        *,
        weight: float = 1.0,
        epoch: int | None = None,
        overwrite: bool = False,
        do_update: bool = True,
        return_value: bool = False,
        if_match: str | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Add `weight` times the gradient to the sum, exactly once; it is on the server's disk when this returns.

        The gradient broadcasts into the buffer's shape and is converted to its dtype. It must not change before this
        returns. With `epoch`, the add is refused unless the buffer is in it. `overwrite` replaces the sum;
        `do_update=False` changes nothing. `return_value` puts the sum into the receipt's `value`. `if_match` is the
        `etag` that the buffer must have.

        A key is made for each call, so that all its attempts count once. With an `idempotency_key` of your own, calls
        with the same arguments count once altogether, for as long as the server remembers keys (a day).

        Raises `NotFound`, `InvalidInput`, `StaleEpoch`, `PreconditionFailed` and `StoreFull`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=32).count
        1
        """
        return self._client._run(
            _buffer_calls.accumulate(
                self.name,
                gradient,
                weight=weight,
                epoch=epoch,
                overwrite=overwrite,
                do_update=do_update,
                return_value=return_value,
                if_match=if_match,
                idempotency_key=idempotency_key,
            )
        )

    def value(
        self,
        *,
        epoch: int | None = None,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        timeout: float = 0.0,
    ) -> Array:
        """The running sum, or with `epoch` that of a closed epoch, for which this waits up to `timeout` seconds.

        reduce="mean" divides it by the sum of the weights. `dtype` is that of the array, by default the buffer's.

        Raises `NotFound`, `EpochOpen` once the seconds are over, `EpochGone` if the epoch is not kept any more, and
        `Conflict` for the mean of weights that sum to zero.

        >>> server.buffers["w1"].value()
        array([[0., 0.]], dtype=float32)
        """
        return self._client._run(
            _buffer_calls.value(self.name, epoch=epoch, reduce=reduce, dtype=dtype, timeout=timeout)
        )

    def take(
        self,
        *,
        min_count: int = 0,
        epoch: int | None = None,
        timeout: float = 0.0,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        if_match: str | None = None,
        idempotency_key: str | None = None,
    ) -> Taken:
        """Close the epoch, and have its value with the receipt: read and zero in one step.

        It waits up to `timeout` seconds until at least `min_count` gradients are in, and then raises `EpochOpen`; and
        `StaleEpoch` if the buffer is not in `epoch`, if that is given. Where several take from a buffer, let it `keep`
        more epochs than they are: a call whose answer was lost needs its value once more, or raises `EpochGone`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=2).closed
        False
        >>> server.buffers["w1"].take(min_count=1, reduce="mean").value
        array([[1., 2.]], dtype=float32)
        """
        return self._client._run(
            _buffer_calls.take(
                self.name,
                min_count=min_count,
                epoch=epoch,
                timeout=timeout,
                reduce=reduce,
                dtype=dtype,
                if_match=if_match,
                idempotency_key=idempotency_key,
            )
        )

    def zero(self, *, if_match: str | None = None, idempotency_key: str | None = None) -> Receipt:
        """Discard the sum, and begin the next epoch.

        >>> server.buffers["w1"].zero().epoch
        1
        """
        return self._client._run(_buffer_calls.zero(self.name, if_match=if_match, idempotency_key=idempotency_key))

    def delete(self, *, if_match: str | None = None, idempotency_key: str | None = None) -> None:
        """Forget the buffer, its value and its closed epochs. Raises `NotFound`.

        >>> server.buffers["w1"].delete()
        """
        return self._client._run(_buffer_calls.delete(self.name, if_match=if_match, idempotency_key=idempotency_key))
