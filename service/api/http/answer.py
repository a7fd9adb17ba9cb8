"""The answer to a request: its status, its headers, and the pieces of its body."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast, get_args

import orjson
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from starlette.responses import Response

from service.api.http.body import deflated
from service.api.http.call import Call
from service.codecs import json as json_codec
from service.dtypes import DTYPES, DType

T = TypeVar("T")

JSON = "application/json"


class AnswerForm(NamedTuple):
    """The form of tensors in an answer."""

    encoding: json_codec.Encoding | None
    """How JSON writes them; None if they are bytes."""
    coding: str | None = None
    """How lists are compressed."""
    dtype: str | None = None
    """Their dtype, if it is not their own."""
    is_mean: bool = False
    is_coded: bool = False
    """Whether it has codes of 8 bits, and their scales, in place of numbers."""

    def extra_bytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Return how much memory the answer takes for such a tensor, beside the tensor itself."""
        target = dtype if self.dtype is None else DTYPES[self.dtype]
        size = math.prod(shape) * target.itemsize
        text = 0 if self.encoding is None else json_codec.encoded_bytes(shape, target, self.encoding)
        copied = size if self.is_mean or self.is_coded or target != dtype else 0  # codes take less
        return copied + (text if self.coding is None else 2 * text)


class Answer(Response):
    """An answer. The connection joins its pieces only if they are small."""

    code: str | None = None
    """The code of the error that the answer tells."""

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview] = (),
        media_type: str | None = None,
        fields: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> None:
        self.pieces, self.media_type, self.status_code = pieces, media_type, status
        self.fields: Mapping[str, str] = fields or {}
        """Headers besides Content-Type and Content-Length."""
        self.background = None
        self.size = sum(map(len, pieces))
        """Bytes of the body."""

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:  # type: ignore[override]
        """The headers as pairs of bytes."""
        headers = [] if self.media_type is None else [(b"content-type", self.media_type.encode())]
        if self.status_code not in (204, 304):
            headers.append((b"content-length", b"%d" % self.size))
        return headers + [(name.encode(), value.encode("latin-1")) for name, value in self.fields.items()]

    def coded(self, coding: str | None) -> Answer:
        """Return the answer compressed with gzip or deflate; with None, or if it does not shrink, the answer itself."""
        pieces = [] if coding is None else deflated(self.pieces, coding)
        if coding is None or sum(map(len, pieces)) >= self.size:
            return self
        fields = {**self.fields, "Content-Encoding": coding}
        if "ETag" in fields:
            fields["ETag"] = coded_tag(fields["ETag"], coding)
        return Answer(pieces, self.media_type, fields, self.status_code)

    async def reply(self, call: Call) -> None:
        began = time.perf_counter_ns()
        call.status = self.status_code
        if call.status >= 400:
            call.identify()
            call.code = self.code
        headers = self.raw_headers
        if call.request_id is not None:
            headers.append((b"x-request-id", call.request_id.encode()))
        await call.exchange.answer(self.status_code, headers, self.pieces, self.size)
        call.sent = call.exchange.written
        call.spent["write"] = time.perf_counter_ns() - began


def coded_tag(tag: str, coding: str) -> str:
    """Return the tag of an answer in this coding. A strong tag belongs to one sequence of bytes (RFC 9110, 8.8.1)."""
    return f'{tag[:-1]}-{coding}"'


class JsonAnswer(Answer, Generic[T]):
    """An answer whose body is a value of this type as JSON. OpenAPI shows the type where a handler returns it."""

    def __init__(self, content: T, status: int = 200, fields: Mapping[str, str] | None = None) -> None:
        super().__init__([orjson.dumps(content)], JSON, fields, status)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(*get_args(source))


def written(text: bytes, kind: type[T]) -> T:
    """Return the JSON text of a value in the place of the value."""
    return cast(T, orjson.Fragment(text))
