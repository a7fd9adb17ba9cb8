"""A named accumulation buffer of a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from gradserve_client import _buffer_calls
from gradserve_client._buffer_calls import Reduce
from gradserve_client._runner import Runner
from gradserve_client._tensors import Array, TensorLike
from gradserve_client.models import BufferInfo, BufferName, Receipt, Taken


class Buffer(BufferName):
    """A buffer: a sum with a name, a count and a weight. Operators take it as an input."""

    def __init__(self, runner: Runner, name: str) -> None:
        super().__init__(name)
        self._runner = runner

    def create(
        self,
        shape: Sequence[int] | int,
        *,
        dtype: npt.DTypeLike = "float32",
        quorum: int | None = None,
        keep: int = 1,
        nonfinite: str = "allow",
        ttl_seconds: float | None = None,
        max_norm: float | None = None,
        exist_ok: bool = True,
        idempotency_key: str | None = None,
    ) -> BufferInfo:
        """Create the buffer with zeros. An equal buffer may exist already, unless `exist_ok` is False.

        `dtype` is float16, bfloat16, float32 or float64. The `quorum`th gradient closes the epoch. The server keeps the
        last `keep` closed epochs. With nonfinite="reject", it refuses gradients that would make the sum infinite or
        NaN. It deletes the buffer `ttl_seconds` after the last change. It refuses gradients whose 2-norm, without the
        weight, is above `max_norm`.

        Raises `Conflict` if a different buffer of this name exists, `PreconditionFailed` if any exists and `exist_ok`
        is False, `TooManyBuffers`, and `InvalidInput`.

        >>> server.buffers["emb.weight"].create((30000, 256), quorum=8).bytes
        30720000
        """
        return self._runner.run(
            _buffer_calls.create(
                self.name,
                _buffer_calls.spec_json(
                    shape,
                    dtype=dtype,
                    quorum=quorum,
                    keep=keep,
                    nonfinite=nonfinite,
                    ttl_seconds=ttl_seconds,
                    max_norm=max_norm,
                ),
                exist_ok=exist_ok,
                idempotency_key=idempotency_key,
            )
        )

    def info(self) -> BufferInfo:
        """Return the buffer's metadata. Raises `NotFound`.

        >>> server.buffers["w1"].info().shape
        (1, 2)
        """
        return self._runner.run(_buffer_calls.info(self.name))

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
        """Add `weight` times the gradient to the sum, exactly once. The sum is on the server's disk afterwards.

        The server broadcasts the gradient to the buffer's shape and converts it to the buffer's dtype. The array must
        not change during the call. With `epoch`, the server refuses the gradient unless the buffer is in that epoch.
        `overwrite` replaces the sum. `do_update=False` changes nothing. `return_value` puts the sum into the receipt's
        `value`. `if_match` is the `etag` that the buffer must have.

        Each call gets a new key, so that all its attempts count once. With your own `idempotency_key`, all calls with
        the same arguments count once together, as long as the server remembers the key (a day).

        Raises `NotFound`, `InvalidInput`, `StaleEpoch`, `PreconditionFailed` and `StoreFull`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=32).count
        1
        """
        return self._runner.run(
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
        """Return the running sum, or the sum of `epoch`, after up to `timeout` seconds until the epoch has closed.

        reduce="mean" divides the sum by the sum of the weights. `dtype` is that of the result, by default the buffer's.

        Raises `NotFound`, `EpochOpen` after the `timeout`, `EpochGone` if the server no longer keeps the epoch, and
        `Conflict` for the mean of weights that sum to zero.

        >>> server.buffers["w1"].value()
        array([[0., 0.]], dtype=float32)
        """
        return self._runner.run(
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
        """Close the epoch, and return its receipt with its value: read and zero in a single step.

        The call waits up to `timeout` seconds for `min_count` gradients, and then raises `EpochOpen`. It raises
        `StaleEpoch` if the buffer is not in `epoch`. If several clients take from a buffer, let it `keep` more epochs
        than there are clients: a retry after a lost answer reads the closed epoch, or raises `EpochGone`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=2).closed
        False
        >>> server.buffers["w1"].take(min_count=1, reduce="mean").value
        array([[1., 2.]], dtype=float32)
        """
        return self._runner.run(
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
        return self._runner.run(_buffer_calls.zero(self.name, if_match=if_match, idempotency_key=idempotency_key))

    def delete(self, *, if_match: str | None = None, idempotency_key: str | None = None) -> None:
        """Delete the buffer, its value and its closed epochs. Raises `NotFound`.

        >>> server.buffers["w1"].delete()
        """
        return self._runner.run(_buffer_calls.delete(self.name, if_match=if_match, idempotency_key=idempotency_key))
