"""Tags of answers: a cache never hands out another form, another state or another buffer than the server would."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import httpx
import numpy as np
import pytest
from hishel import CacheOptions, SqliteStorage
from hishel.httpx import CacheClient

from tests.api.calls import add, create, fresh, get, loaded, post, saved
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.serving import assert_problem

SIZE = 500
"""Elements of a value that is worth compressing."""

TO_GZIP = {"Accept-Encoding": "gzip"}
FORMS: dict[str, dict[str, str]] = {
    "JSON": {"Accept-Encoding": "identity"},
    "safetensors": {**TO_SAFETENSORS, "Accept-Encoding": "identity"},
    "JSON in gzip": TO_GZIP,
    "JSON in deflate": {"Accept-Encoding": "deflate"},
    "JSON in x-gzip": {"Accept-Encoding": "x-gzip"},
}
"""The headers that ask for each representation of a value."""


@pytest.fixture
def cache(http: httpx.Client) -> Iterator[httpx.Client]:
    """Yield a client with a cache of its own, as RFC 9111 has it."""
    memory = SqliteStorage(connection=sqlite3.connect(":memory:", check_same_thread=False))
    with CacheClient(base_url=http.base_url, storage=memory, rfc=CacheOptions(shared=False)) as client:
        yield client


def filled(http: httpx.Client, name: str | None = None, number: float = 1, **rules: Any) -> str:
    """Create a buffer whose value has one gradient, and return its name."""
    name = create(http, name, (SIZE,), **rules)
    assert add(http, name, number).status_code == 200
    return name


def number_in(answer: httpx.Response, headers: dict[str, str]) -> float:
    """Return the number that fills the value, once the answer has the form that these headers ask for."""
    if "Accept" in headers:
        array = loaded(answer)[0]["value"]
    else:
        assert answer.headers["content-type"] == "application/json"
        is_coded = answer.headers.get("content-encoding") == "x-gzip"  # which httpx does not know
        text = gzip.decompress(answer.content) if is_coded else answer.content
        array = np.array(json.loads(text)["value"]["data"])
    assert array.shape == (SIZE,)
    assert (array == array[0]).all()
    return float(array[0])


def test_a_cache_hands_out_what_the_server_would(http: httpx.Client, cache: httpx.Client) -> None:
    name = filled(http, keep=2)
    for asked in permutations(["JSON", "safetensors", "JSON in gzip"]):
        for form in asked:
            assert number_in(get(cache, name, headers=FORMS[form]), FORMS[form]) == 1
    add(http, name, 2)
    for headers in FORMS.values():
        assert number_in(get(cache, name, headers=headers), headers) == 3
    post(http, name, "take")
    for headers in FORMS.values():
        assert number_in(get(cache, name, headers=headers, step=0), headers) == 3
        assert number_in(get(cache, name, headers=headers), headers) == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_keeps_an_unchanged_value(http: httpx.Client, cache: httpx.Client, form: str) -> None:
    name = filled(http)
    first, again = (get(cache, name, headers=FORMS[form]) for _ in range(2))
    assert again.content == first.content
    assert again.extensions["caching"] == {"from_cache": True, "revalidated": True, "stored": False}


def test_a_cache_tells_a_buffer_from_another_of_its_name(http: httpx.Client, cache: httpx.Client) -> None:
    name = filled(http, number=1)
    path = f"/v1/buffers/{name}"
    assert get(cache, name).json()["value"]["data"] == [1.0] * SIZE
    before = cache.get(path).json()
    http.delete(path)
    filled(http, name, number=2)
    assert get(cache, name).json()["value"]["data"] == [2.0] * SIZE
    after = cache.get(path).json()
    assert after["created_at"] > before["created_at"]
    assert (after["step"], after["version"]) == (before["step"], before["version"])


def test_each_representation_has_its_own_tag(http: httpx.Client) -> None:
    name = filled(http)
    answers = {form: get(http, name, headers=headers) for form, headers in FORMS.items()}
    tags = {form: answer.headers["etag"] for form, answer in answers.items()}
    assert len(set(tags.values())) == len(FORMS)
    assert not any(tag.startswith("W/") for tag in tags.values())
    for form, headers in FORMS.items():
        assert answers[form].headers["vary"] == "Accept, Accept-Encoding"
        head = http.head(f"/v1/buffers/{name}/value", headers=headers)
        assert (head.headers["etag"], head.headers["content-length"]) == (
            tags[form],
            answers[form].headers["content-length"],
        )
        for other, tag in tags.items():
            for known in (tag, f"W/{tag}", f'"9-9", {tag}'):
                answer = get(http, name, headers={**headers, "If-None-Match": known})
                # Who accepts gzip accepts the plain form, too.
                same = other == form or (" in " in form and other == form.split(" in ")[0])
                assert answer.status_code == (304 if same else 200), (form, other)
                assert answer.headers["etag"] == (tag if same else tags[form])
        everything = get(http, name, headers={**headers, "If-None-Match": ", ".join(tags.values())})
        assert (everything.status_code, everything.headers["etag"]) == (304, tags[form])


def test_answers_of_changes_have_a_tag_for_each_form(http: httpx.Client) -> None:
    name, gradient = fresh(), np.zeros(SIZE, np.float32)
    create(http, name, (SIZE,))
    as_json = add(http, name, 0, **{"return": "value"})
    compressed = add(http, name, 0, TO_GZIP, **{"return": "value"})
    path = f"/v1/buffers/{name}/accumulate?return=value"
    file = http.post(path, content=saved({"gradient": gradient}), headers={**SAFE, "Accept-Encoding": "identity"})
    coded = http.post(path, content=saved({"gradient": gradient}), headers={**SAFE, **TO_GZIP})
    assert [answer.headers["etag"] for answer in (as_json, compressed, file, coded)] == [
        '"0-1"',
        '"0-2-gzip"',
        '"0-3-safetensors"',
        '"0-4-safetensors"',
    ]


def test_if_match_takes_every_tag_of_a_state(http: httpx.Client) -> None:
    name = filled(http)
    for form in [*FORMS, "metadata"]:
        path = f"/v1/buffers/{name}" + ("" if form == "metadata" else "/value")
        tag = http.get(path, headers=FORMS.get(form)).headers["etag"]
        assert_problem(add(http, name, 1, {"If-Match": f"W/{tag}"}), 412, "precondition_failed")  # a strong comparison
        done = add(http, name, 1, {"If-Match": tag, **TO_SAFETENSORS})
        assert done.status_code == 200
        assert_problem(add(http, name, 1, {"If-Match": tag}), 412, "precondition_failed", name)
        assert add(http, name, 1, {"If-Match": done.headers["etag"]}).status_code == 200


def test_if_match_knows_a_buffer_from_another_of_its_name(http: httpx.Client) -> None:
    name = filled(http)
    tags = [get(http, name, headers=headers).headers["etag"] for headers in FORMS.values()]
    http.delete(f"/v1/buffers/{name}")
    filled(http, name)
    for tag in tags:
        assert_problem(add(http, name, 1, {"If-Match": tag}), 412, "precondition_failed", '"0-1"')
    assert add(http, name, 1, {"If-Match": '"0-1"'}).status_code == 200


def test_a_tag_of_any_form_keeps_put_from_finding_the_buffer(http: httpx.Client) -> None:
    name = filled(http)
    for headers in FORMS.values():
        tag = get(http, name, headers=headers).headers["etag"]
        for unless in (tag, f"W/{tag}"):
            again = http.put(f"/v1/buffers/{name}", json={"shape": [SIZE]}, headers={"If-None-Match": unless})
            assert_problem(again, 412, "precondition_failed", "If-None-Match")


def test_a_compressed_answer_is_what_its_tag_says(http: httpx.Client) -> None:
    name = filled(http)
    with http.stream("GET", f"/v1/buffers/{name}/value", headers=TO_GZIP) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["etag"].endswith('-gzip"')
    assert gzip.decompress(raw) == get(http, name).content
