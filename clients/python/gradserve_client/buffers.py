"""The named accumulation buffers of a server, several at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy.typing as npt

from gradserve_client._adding import added, learn_limits
from gradserve_client._http.runner import Runner
from gradserve_client._wire import answers, bulk, pushes
from gradserve_client._wire.arguments import as_key, as_name, check_mapping
from gradserve_client._wire.specs import Reduce
from gradserve_client._wire.tensors import FLOATS, Array, TensorLike, as_array
from gradserve_client.buffer import Buffer
from gradserve_client.models import BufferInfo, BufferRules, BufferSpec, Receipt, StagedPush, Statistics, Taken
from gradserve_client.rows import Rows


class Buffers:
    """The buffers of a server. `server.buffers["emb.weight"]` is a single buffer.

    The methods act on several buffers at once, on all of a server or on none. A method with `names` also takes
    `prefix` instead.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    __iter__ = None  # otherwise Python would call __getitem__ with 0, 1, 2, ... without end
    __contains__ = None

    def __getitem__(self, name: str) -> Buffer:
        """Return the buffer of this name, which need not exist: 1 to 200 of the characters A-Z a-z 0-9 . _ : -"""
        return Buffer(self._runner, name)

    def list(self, prefix: str = "") -> list[BufferInfo]:
        """Return the buffers whose names begin with `prefix`, ordered by name.

        >>> [buffer.name for buffer in server.buffers.list("layer1.")]
        ['layer1.bias', 'layer1.weight']
        """
        infos: list[BufferInfo] = []
        for shard in self._runner.shards:
            cursor: str | None = ""
            while cursor is not None:
                page, cursor = shard.run(bulk.page("buffers", BufferInfo.of, prefix, cursor))
                infos += page
        return sorted(infos, key=lambda info: info.name)

    def create_many(
        self, specs: Mapping[str, BufferSpec], *, idempotency_key: str | None = None
    ) -> dict[str, BufferInfo]:
        """Create buffers of these names with zeros, in one request; return their metadata. Equal buffers may exist.

        Each value has the arguments of `Buffer.create`, except `exist_ok`, and needs only `shape`. Raises `Conflict`,
        whose `context["buffers"]` names the buffers that differ.

        >>> made = server.buffers.create_many({"v1": {"shape": (2, 3), "quorum": 8}, "v2": {"shape": 3}})
        >>> made["v1"].quorum, made["v2"].shape
        (8, (3,))
        """
        return self._runner.run(bulk.create(specs, idempotency_key=idempotency_key))

    def accumulate(
        self,
        gradients: Mapping[str, TensorLike | Rows],
        *,
        weight: float = 1.0,
        step: int | None = None,
        overwrite: bool = False,
        do_update: bool = True,
        contributor: str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Receipt]:
        """Add `weight` times each gradient to the buffer of its name, all or none; see `Buffer.accumulate`.

        What one request cannot carry goes as a push in parts, which the server adds at one moment. Its id is the
        `idempotency_key`. Raises `TooLarge` for a single gradient that is larger than a request.

        >>> receipts = server.buffers.accumulate({"w1": [[1, 2]], "w2": [3]}, weight=32)
        >>> receipts["w1"].count, receipts["w1"].weight
        (1, 32.0)
        """
        return added(
            self._runner,
            bulk.accumulate(
                gradients,
                weight=weight,
                step=step,
                overwrite=overwrite,
                do_update=do_update,
                contributor=contributor,
                idempotency_key=idempotency_key,
            ),
        )

    def set(
        self,
        tensors: Mapping[str, TensorLike],
        *,
        prefix: str = "",
        wire_dtype: Literal["int8"] | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Receipt]:
        """Write tensors over the buffers of their names behind `prefix`, and create those that are missing.

        Each tensor then counts as the only gradient. A request carries all of them or, beyond 64 MiB or half of what
        the server takes, some: each request writes all of its tensors or none. `value(prefix=...)` reads them back.
        With wire_dtype="int8", tensors of 1,024 numbers or more travel in 8 bits a number; see `Buffer.value`.

        >>> receipts = server.buffers.set({"w": [[1, 2]], "b": [3]}, prefix="m.p.")
        >>> server.buffers.value(prefix="m.p.")["m.p.b"]
        array([3.], dtype=float32)
        """
        check_mapping("tensors", tensors, "tensors")
        arrays = {as_name(f"{prefix}{name}"): as_array(tensor, name, dtypes=FLOATS) for name, tensor in tensors.items()}
        specs = {name: BufferSpec(shape=array.shape, dtype=array.dtype) for name, array in arrays.items()}
        found = self.list(os.path.commonprefix([*specs]))
        if missing := specs.keys() - {one.name for one in found}:
            self._runner.run(bulk.create({name: specs[name] for name in missing}, idempotency_key=None))
        for shard in self._runner.shards:
            learn_limits(shard)
        most = min(shard.limits["max_body_bytes"] for shard in self._runner.shards)
        receipts: dict[str, Receipt] = {}
        for call in pushes.overwrites(pushes.travelling(arrays, wire_dtype), most, as_key(idempotency_key)):
            some = self._runner.run(call)
            receipts |= some
        return receipts

    def pushes(self, prefix: str = "") -> Sequence[StagedPush]:
        """Return the pushes in parts that are not complete and add to a buffer with `prefix`, the oldest first.

        >>> server.buffers.pushes("layer1.")
        []
        """
        found = [push for shard in self._runner.shards for push in shard.run(pushes.listed(prefix))]
        return sorted(found, key=lambda push: push.began_at)

    def forget_push(self, push: str) -> bool:
        """Forget a push in parts that is not complete, and free its parts. Return whether any was staged.

        >>> server.buffers.forget_push("step17")
        False
        """
        forgotten = [shard.run(pushes.forget(push)) for shard in self._runner.shards]
        return any(forgotten)

    def value(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        step: int | None = None,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        wire_dtype: Literal["int8"] | None = None,
        timeout: float = 0.0,
    ) -> dict[str, Array]:
        """Return the values by name, those of a server all of the same moment; see `Buffer.value`.

        >>> server.buffers.value(["w1", "w2"])
        {'w1': array([[0., 0.]], dtype=float32), 'w2': array([0.], dtype=float32)}
        """
        more: Any = {"dtype": dtype, "wire_dtype": wire_dtype, "timeout": timeout}
        return self._runner.run(bulk.value(names, prefix, step=step, reduce=reduce, **more))

    def statistics(
        self, names: Collection[str] | None = None, *, prefix: str | None = None
    ) -> dict[str, Statistics | None]:
        """Return the statistics by name, without histograms and steps; see `Buffer.statistics`.

        The server computes a bounded number at once. A buffer that it has not come to yet is None; one that has
        changed since has an earlier `version`. Ask again.

        >>> server.buffers.statistics(["w1"])["w1"].zeros
        2
        """
        return self._runner.run(bulk.on_several(names, prefix, "statistics", answers.statistics_by_name))

    def take(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        min_count: int = 0,
        step: int | None = None,
        timeout: float = 0.0,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Taken]:
        """Close the steps, and return their receipts and values by name; see `Buffer.take`.

        >>> sorted(server.buffers.take(prefix="layer1."))
        ['layer1.bias', 'layer1.weight']
        """
        return self._runner.run(
            bulk.take(
                names,
                prefix,
                min_count=min_count,
                step=step,
                timeout=timeout,
                reduce=reduce,
                dtype=dtype,
                idempotency_key=idempotency_key,
            )
        )

    def close_step(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        min_count: int = 0,
        step: int | None = None,
        timeout: float = 0.0,
        idempotency_key: str | None = None,
    ) -> dict[str, Receipt]:
        """Close the steps as `take` does, and return their receipts by name without the values.

        So the steps of a large model close at one moment. `value(step=...)` then reads them in pieces.

        >>> sorted(server.buffers.close_step(prefix="layer1."))
        ['layer1.bias', 'layer1.weight']
        """
        return self._runner.run(
            bulk.close_step(
                names, prefix, min_count=min_count, step=step, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    def zero(
        self, names: Collection[str] | None = None, *, prefix: str | None = None, idempotency_key: str | None = None
    ) -> dict[str, Receipt]:
        """Discard the sums, and begin the next steps; see `Buffer.zero`.

        >>> server.buffers.zero(["w1"])["w1"].step
        1
        """
        key = as_key(idempotency_key)
        return self._runner.run(bulk.on_several(names, prefix, "zero", answers.receipts, key=key))

    def set_rules(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str | None = None,
        all: bool = False,
        idempotency_key: str | None = None,
        **rules: Unpack[BufferRules],
    ) -> dict[str, Receipt]:
        """Change rules of buffers, of all of a server's or of none; see `Buffer.set_rules`.

        An empty `prefix` is refused, because a variable may be unset: `all` means all buffers of the namespace. Raises
        `NotFound` if no buffer has the prefix.

        >>> changed = server.buffers.set_rules(prefix="layer1.", quorum=3)
        >>> [changed[name].updated for name in sorted(changed)]
        [True, True]
        """
        return self._runner.run(bulk.set_rules(names, prefix, rules, all=all, idempotency_key=idempotency_key))

    def delete(
        self, *, prefix: str | None = None, all: bool = False, idempotency_key: str | None = None
    ) -> dict[str, Receipt]:
        """Delete the buffers whose names begin with `prefix`, all of a server's or none; return their last receipts.

        End a prefix with its separator: "run7" fits "run70.weight", too. An empty prefix is refused, because a variable
        may be unset: `all` means all buffers of the namespace. If no buffer has the prefix, nothing happens.

        >>> sorted(server.buffers.delete(prefix="layer1."))
        ['layer1.bias', 'layer1.weight']
        >>> server.buffers.delete(prefix="layer1.")
        {}
        """
        return self._runner.run(bulk.delete(prefix, all=all, idempotency_key=idempotency_key))
