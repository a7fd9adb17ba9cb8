"""Content codings: gzip in several members, answers that shrink and answers that do not, and what is refused."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.http.body import MAX_MEMBERS
from service.codecs.safetensors import MEDIA_TYPE
from tests.api.calls import add, as_file, create, get, loaded, ok, post, saved
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.serving import assert_problem

JSON = {"Content-Type": "application/json"}
RELU = "/v1/ops/ReluGrad"
INFER = "/v2/models/ReluGrad/infer"

SIZE = 30_000
"""Elements of a large tensor."""

NOISE = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
ONES = np.ones(SIZE, np.float32)
HALF = np.maximum(NOISE, 0)


# ----- bodies -----


def inflated(client: httpx.Client, *members: bytes, coding: str = "gzip") -> httpx.Response:
    return client.post(RELU, content=b"".join(members), headers={**JSON, "Content-Encoding": coding})


@pytest.mark.parametrize("coding", ["gzip", "x-gzip"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_gzip_members_in_a_row_are_one_body(client: httpx.Client, coding: str, size: int) -> None:
    body = json.dumps({"dY": [3.5] * 300, "X": [1] * 300}).encode()
    members = [gzip.compress(body[start : start + size]) for start in range(0, len(body), size)]
    answer = inflated(client, *members, gzip.compress(b""), coding=coding)
    assert answer.json()["dX"]["data"] == [3.5] * 300


def test_a_large_body_has_several_members(client: httpx.Client) -> None:
    body = saved({"dY": NOISE, "X": ONES})
    content = b"".join(gzip.compress(body[start : start + 50_000]) for start in range(0, len(body), 50_000))
    answer = client.post(RELU, content=content, headers={**SAFE, "Content-Encoding": "gzip"})
    assert loaded(answer)[0]["dX"].tobytes() == NOISE.tobytes()


@pytest.mark.parametrize(
    ("members", "coding", "words"),
    [
        ((gzip.compress(b"{}"), gzip.compress(b" ")[:-3]), "gzip", "ends too early"),
        ((gzip.compress(b"{}"), b"\x1f\x8b"), "gzip", "ends too early"),
        ((gzip.compress(b"{}"), b"\x1f\x8b" + bytes(20)), "gzip", "not gzip"),
        ((gzip.compress(b"{}"), bytes(4)), "gzip", "bytes after its end"),
        ((zlib.compress(b"{}"), zlib.compress(b" ")), "deflate", "bytes after its end"),
        ((gzip.compress(b"") * (MAX_MEMBERS + 1),), "gzip", f"more than {MAX_MEMBERS} gzip members"),
    ],
    ids=["cut off", "begun", "no member", "zeros", "deflate", "too many"],
)
def test_a_body_of_other_than_members_is_refused(client: httpx.Client, members: Any, coding: str, words: str) -> None:
    assert_problem(inflated(client, *members, coding=coding), 400, "malformed_body", coding, words)


def test_all_members_count_against_the_limit(client: httpx.Client) -> None:
    member = gzip.compress(bytes(1 << 20))
    assert_problem(inflated(client, member, member), 400, "malformed_body", "JSON")
    assert_problem(inflated(client, *[member] * 3), 413, "body_too_large", "2097152", "decompressed")


@pytest.mark.parametrize("coding", [["br"], ["zstd"], ["gzip, gzip"], ["gzip", "gzip"], ["identity", "br"], [""]])
@pytest.mark.parametrize("path", [RELU, INFER])
def test_an_unread_coding_is_answered_with_those_read(client: httpx.Client, path: str, coding: list[str]) -> None:
    headers = [("Content-Type", "application/json"), *(("Content-Encoding", one) for one in coding)]
    answer = client.post(path, content=gzip.compress(gzip.compress(b"{}")), headers=headers)
    assert answer.status_code == (415 if path == RELU else 400)
    assert answer.headers["accept-encoding"] == "identity, gzip, deflate"
    assert "accept" not in answer.headers


def test_an_unread_media_type_is_answered_with_those_that_are_read(http: httpx.Client) -> None:
    name = create(http)
    answer = http.post(RELU, content=b"{}", headers={"Content-Type": "text/plain"})
    assert_problem(answer, 415, "unsupported_media_type")
    assert answer.headers["accept"] == f"application/json, {MEDIA_TYPE}"
    only = http.put(f"/v1/buffers/{name}", **as_file({}))
    assert_problem(only, 415, "unsupported_media_type")
    assert only.headers["accept"] == "application/json"
    assert "accept-encoding" not in answer.headers.keys() | only.headers.keys()


# ----- answers -----


def asked(client: httpx.Client, url: str, coding: str = "gzip", **request: Any) -> tuple[str | None, bytes]:
    """Return the coding of the answer, and its body without the coding."""
    headers = {**request.pop("headers", {}), "Accept-Encoding": coding}
    with client.stream("POST", url, headers=headers, **request) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.status_code == 200, raw
    assert int(answer.headers["content-length"]) == len(raw)
    found = answer.headers.get("content-encoding")
    return found, raw if found is None else zlib.decompress(raw, 15 if found == "deflate" else 31)


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate"])
@pytest.mark.parametrize(
    ("dY", "encoding", "shrinks"),
    [
        *((dY, None, False) for dY in (NOISE, HALF, ONES, NOISE[:0])),
        *((dY, "base64", False) for dY in (NOISE, ONES)),
        *((dY, "list", True) for dY in (HALF, NOISE)),
        (NOISE[:2], "list", False),
    ],
)
def test_only_lists_that_shrink_are_compressed(
    client: httpx.Client, dY: Any, encoding: str | None, shrinks: bool, coding: str
) -> None:
    headers = {**SAFE, "Accept": MEDIA_TYPE if encoding is None else "application/json"}
    request: dict[str, Any] = {"content": saved({"dY": dY, "X": np.ones_like(dY)}), "headers": headers}
    params = {} if encoding is None else {"encoding": encoding}
    found, body = asked(client, RELU, coding, params=params, **request)
    assert found == (coding if shrinks else None)
    assert body == client.post(RELU, params=params, **request).content


def test_binary_tensors_go_plain(client: httpx.Client) -> None:
    form = {"datatype": "FP32", "shape": [SIZE], "parameters": {"binary_data_size": 4 * SIZE}}
    for dY in (NOISE, ONES):
        inputs = [{"name": name, **form} for name in ("dY", "X")]
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        found, body = asked(client, INFER, content=text + dY.tobytes() + ONES.tobytes(), headers=headers)
        assert found is None
        assert body.endswith(dY.tobytes())


def test_binary_values_of_buffers_go_plain(http: httpx.Client) -> None:
    for gradient in (NOISE, ONES):
        name = create(http, shape=(SIZE,))
        http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": gradient}))
        headers = {**TO_SAFETENSORS, "Accept-Encoding": "gzip"}
        for answer in (
            get(http, name, headers),
            http.post("/v1/buffers/value", json={"names": [name]}, headers=headers),
            post(http, name, "take", headers),
        ):
            assert "content-encoding" not in answer.headers
            (value,) = loaded(answer)[0].values()
            assert value.tobytes() == gradient.tobytes()
            tag = answer.headers.get("etag")
            assert tag is None or not tag.endswith('-gzip"')


GZIP = ("gzip;q=0.5", "gzip;q=1.0", "gzip, identity", "gzip;q=1, identity;q=0.5, *;q=0", "gzip, deflate;q=0")
RUBY = "gzip;q=1.0,deflate;q=0.6,identity;q=0.3"  # Net::HTTP
PLAIN = ("gzip;q=0", "gzip;q=0, deflate;q=0", RUBY, "gzip, *", "*", "*;q=0", "identity", "br", ",")
WISHES = {**dict.fromkeys(GZIP, "gzip"), "identity;q=0, deflate": "deflate", **dict.fromkeys(PLAIN)}


@pytest.mark.parametrize(("accepted", "coding"), WISHES.items(), ids=str)
def test_a_client_that_names_one_coding_gets_it(http: httpx.Client, accepted: str, coding: str | None) -> None:
    name = create(http, shape=(1000,))
    ok(add(http, name, 1))
    for lines in ([accepted], [*map(str.strip, accepted.split(","))]):  # as one line and as several
        answer = get(http, name, [("Accept-Encoding", line) for line in lines])
        assert answer.headers.get("content-encoding") == coding
    assert answer.json()["value"]["data"] == [1.0] * 1000
