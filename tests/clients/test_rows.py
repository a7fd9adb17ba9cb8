"""Sparse gradients of both clients: `Rows` in place of an array."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gradserve_client import InvalidInput, Rows

from tests.clients.both import connected
from tests.serving import serving

INDICES, ROWS = [0, -1, 0], [[1, 2], [3, 4], [5, 6]]
SUM = [[6, 8], [0, 0], [0, 0], [3, 4]]

FORMS: dict[str, Any] = {
    "lists": Rows(INDICES, ROWS),
    "arrays": Rows(np.array(INDICES, np.int32), np.array(ROWS, np.float16)),
    "bfloat16": Rows(np.array(INDICES), np.array(ROWS, ml_dtypes.bfloat16)),
    "torch": Rows(torch.tensor(INDICES), torch.tensor(ROWS, dtype=torch.float32)),
    "strided": Rows(np.repeat(INDICES, 2)[::2], np.asfortranarray(np.array(ROWS, np.float64))),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_a_gradient(server: Any, form: str) -> None:
    buffer = server.buffers["emb"]
    buffer.create((4, 2))
    receipt = buffer.accumulate(FORMS[form], weight=2, step=0, contributor="ann", return_value=True)
    assert (receipt.count, receipt.weight, receipt.value.tolist()) == (1, 2.0, (2 * np.array(SUM)).tolist())
    assert buffer.accumulate(FORMS[form], overwrite=True).count == 1
    assert buffer.value().tolist() == SUM


def test_rows_and_arrays_share_a_request(server: Any, key: str) -> None:
    specs = {"emb": {"shape": (4, 2)}, "bias": {"shape": 2}, "words": {"shape": 3}}
    server.buffers.create_many(specs)
    gradients = {"emb": FORMS["lists"], "bias": [1, 2], "words": Rows([1, 1], [1, 2])}
    for replayed in (False, True):
        receipts = server.buffers.accumulate(gradients, idempotency_key=key)
        assert {name: (one.count, one.replayed) for name, one in receipts.items()} == dict.fromkeys(
            specs, (1, replayed)
        )
    values = server.buffers.value([*specs])
    assert {name: one.tolist() for name, one in values.items()} == {"emb": SUM, "bias": [1, 2], "words": [0, 3, 0]}


def test_no_rows_are_a_gradient_of_nothing(server: Any) -> None:
    server.buffers["emb"].create((4, 2))
    for nothing in Rows([], []), Rows(np.zeros(0, np.int64), np.zeros((0, 2))):
        server.buffers["emb"].accumulate(nothing)
    assert (server.buffers["emb"].info().count, server.buffers["emb"].value().any()) == (2, False)


@pytest.mark.parametrize(
    ("indices", "rows", "code"),
    [
        ([4], [[1, 2]], "index_out_of_range"),
        ([[0]], [[1, 2]], "shape_mismatch"),
        ([0, 1], [[1, 2]], "shape_mismatch"),
        (np.zeros(1), [[1, 2]], "dtype_mismatch"),
        ([0], np.zeros((1, 2), np.int32), "dtype_mismatch"),
    ],
)
def test_rows_that_do_not_fit_are_refused(server: Any, indices: Any, rows: Any, code: str) -> None:
    server.buffers["emb"].create((4, 2))
    with pytest.raises(InvalidInput) as caught:
        server.buffers["emb"].accumulate(Rows(indices, rows))
    assert caught.value.code == code
    assert server.buffers["emb"].info().count == 0


@pytest.mark.parametrize(("indices", "rows", "word"), [([0.5], [[1]], "indices"), ([0], [["a"]], "rows")])
def test_rows_of_strange_things_are_refused_at_once(indices: Any, rows: Any, word: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{word} cannot be read as an array"):
        Rows(indices, rows)


def test_rows_show_what_they_have() -> None:
    assert repr(Rows([1], [2.0])) == "Rows(array([1]), array([2.]))"
    assert Rows([1], [[2.0, 3.0]]).nbytes == 24


def test_rows_go_to_the_servers_of_their_buffers(kind: str) -> None:
    names = [f"emb{number}" for number in range(8)]
    with serving() as one, serving() as two, connected(kind, [one, two]) as server:
        server.buffers.create_many({name: {"shape": (4, 2)} for name in names})
        receipts = server.buffers.accumulate(dict.fromkeys(names, FORMS["lists"]))
        assert [*receipts] == names
        assert all(value.tolist() == SUM for value in server.buffers.value(names).values())
