"""Fuzzes the decoders of binary bodies: valid frames, damaged again and again, must give tensors or a GradserveError.

Compressed bodies, damaged after they were compressed, must give what Python's own modules read, or a GradserveError.

Run it with `make fuzz`, or `make fuzz SECONDS=3600`. A frame that gives anything else is shown, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np

from service.api.http.admission import SMALL_BYTES
from service.api.http.body import inflate
from service.codecs import _inference_head, open_inference, safetensors
from service.dtypes import DTYPES, OPEN_INFERENCE, Array
from service.errors import GradserveError
from service.limits import Limits

LIMITS = Limits(1 << 20)

MOST_KEPT = 4000
"""The most frames that wait to be damaged further."""

NUMBERS = [b"0", b"1", b"-1", b"1.5", b"1e400", b"4", b"65", b"true", b"null", b"[]", b'"NaN"']
NUMBERS += [b"%d" % ((1 << bits) + offset) for bits in (31, 32, 53, 62, 63, 64, 100) for offset in (-1, 0, 1)]
TOKENS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b"\\u0000", b"\\ud800", b" " * 100, *NUMBERS]
TOKENS += [b"[" * 70, b"]" * 70, b'{"a":' * 2000, b"[" * 2000, b'"name":', b'"data":', b'"shape":', b'"dtype":']
TOKENS += [b'"__metadata__":{"a":"b"},', b'"parameters":{"binary_data_size":4},', b'"datatype":"BOOL",']


class Frame(NamedTuple):
    """JSON, the bytes after it, and how long the JSON is said to be beyond what it is; None: nothing is said."""

    head: bytes
    data: bytes
    lie: int | None = 0


@dataclass
class Target:
    """A decoder, valid frames, and what has become of those tried."""

    name: str
    frames: list[Frame]
    decode: Callable[[Frame], Iterable[Array]]
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(self, frame: Frame) -> None:
        """Decode a frame, which is kept if something new becomes of it. Raises what no decoder may."""
        try:
            tensors = list(self.decode(frame))
        except GradserveError as error:
            if not 400 <= error.status < 500:
                raise
            outcome = f"{type(error).__name__}: {re.sub('[^a-zA-Z ]+', '', error.detail)[-40:]}"
        else:
            outcome = f"{len(tensors)} tensors"
            if sum(len(tensor.tobytes()) for tensor in tensors) > 8 * (len(frame.head) + len(frame.data)):
                raise AssertionError("more came out than can have been in it")
        if outcome not in self.outcomes and len(self.frames) < MOST_KEPT:
            self.frames.append(frame)
        self.outcomes[outcome] += 1


def arrays() -> dict[str, Array]:
    """A tensor of every dtype, of several shapes."""
    shapes = [(2, 3), (), (0, 2), (1, 1, 2), (4,), (3, 1), (2,)]
    return {name: np.ones(shape, dtype) for (name, dtype), shape in zip(DTYPES.items(), shapes, strict=True)}


def of_safetensors() -> Target:
    def frame(tensors: dict[str, Array]) -> Frame:
        head, *pieces = safetensors.encode(tensors)
        return Frame(bytes(head[8:]), b"".join(pieces))

    def decode(frame: Frame) -> Iterable[Array]:
        length = (len(frame.head) + (frame.lie or 0)) % (1 << 64)
        body = length.to_bytes(8, "little") + frame.head + frame.data
        return safetensors.decode(memoryview(body), LIMITS).values()

    alone = [frame({name: array}) for name, array in arrays().items()]
    return Target("safetensors", [frame({}), frame(arrays()), *alone], decode)


def of_open_inference() -> Target:
    def frame(in_bytes: bool) -> Frame:
        tensors = {name: a for name, a in arrays().items() if in_bytes or name != "bfloat16"}
        pieces, length = open_inference.encode("m", "i", tensors, tensors if in_bytes else ())
        body = b"".join(pieces)
        answer = json.loads(body if length is None else body[:length])
        more = {"outputs": [{"name": "o", "parameters": {"binary_data": True}}], "parameters": {"axis": 1}}
        head = json.dumps({"id": "i", "inputs": answer["outputs"], **more}).encode()
        return Frame(head, b"" if length is None else body[length:], None if length is None else 0)

    def decode(frame: Frame) -> Iterable[Array]:
        length = None if frame.lie is None else max(0, len(frame.head) + frame.lie)
        body = memoryview(frame.head + frame.data)
        with mock.patch.object(_inference_head, "SMALL_JSON_BYTES", 0):  # the reader of long JSON
            with suppress(GradserveError):
                open_inference.decode(body, length, LIMITS)
        return open_inference.decode(body, length, LIMITS).tensors.values()

    assert set(OPEN_INFERENCE) == {a.dtype for a in arrays().values()}
    return Target("open inference", [frame(in_bytes) for in_bytes in (False, True)], decode)


def of_compressed(coding: str) -> Target:
    """Return the target of bodies in a content coding. The first bytes of each body that is read are its tensor."""
    library = {"gzip": gzip, "deflate": zlib}[coding]

    def decode(frame: Frame) -> Iterable[Array]:
        body = frame.head + frame.data
        reserved: list[int] = []
        whole = inflate(memoryview(body), coding, LIMITS.max_tensor_bytes, reserved.append)
        if body and whole != library.decompress(body):
            raise AssertionError("the library reads something else")
        if not 0 <= len(whole) - sum(reserved) <= SMALL_BYTES:
            raise AssertionError(f"{sum(reserved)} bytes were reserved for {len(whole)}")
        return [np.frombuffer(whole[: len(body)], np.uint8)]

    texts = [frame.head + frame.data for target in (of_safetensors(), of_open_inference()) for frame in target.frames]
    texts += [b"", b"a", bytes(1 << 19), bytes(1 << 20), random.Random(0).randbytes(5000)]
    bodies = [bytes(library.compress(text, level)) for text in texts for level in (0, 1, 9)]
    return Target(coding, [Frame(body, b"") for body in bodies], decode)


TARGETS: Mapping[str, Callable[[], Target]] = {
    "safetensors": of_safetensors,
    "open inference": of_open_inference,
    "gzip": partial(of_compressed, "gzip"),
    "deflate": partial(of_compressed, "deflate"),
}

# ----- damage -----


def damaged(frame: Frame, others: list[Frame], random: random.Random) -> Frame:
    """The frame with one to five things done to it."""
    head, data, lie = frame
    for _ in range(random.choice([1, 1, 1, 1, 2, 3, 5])):
        kind = random.random()
        if kind < 0.35:
            head = _with_number(head, random)
        elif kind < 0.75:
            head = _spliced(head, random.choice(others).head, random)
        elif kind < 0.9:
            data = _spliced(data, random.choice(others).data, random)
        else:
            lie = random.choice([None, 0, 0, 0, 1, -1, -8, len(data), len(data) + 1, 1 << 40, (1 << 63) - 1])
    return Frame(head[: 1 << 18], data[: 1 << 16], lie)


def _with_number(text: bytes, random: random.Random) -> bytes:
    places = list(re.finditer(rb"-?[0-9]+(\.[0-9]+)?", text))
    if not places:
        return text
    place = random.choice(places)
    near = b"%d" % (int(float(place[0]) if len(place[0]) < 300 else 0) + random.randint(-2, 2))
    return text[: place.start()] + random.choice([*NUMBERS, near, near, near]) + text[place.end() :]


def _spliced(text: bytes, other: bytes, random: random.Random) -> bytes:
    """`text` with a few of its bytes replaced by a token, by noise, or by a piece of itself or of another."""
    start = random.randint(0, len(text.rstrip(b" ")))
    stop = min(len(text), start + random.choice([0, 0, 1, 2, 8, random.randint(0, 200)]))
    source = random.choice([text, other])
    begin = random.randint(0, len(source))
    piece = source[begin : begin + random.randint(0, 200)]
    return text[:start] + random.choice([b"", random.choice(TOKENS), random.randbytes(3), piece]) + text[stop:]


def fuzz(target: Target, seed: int) -> Iterator[Frame]:
    """Frames, the valid ones first, each after it was decoded without harm, without end."""
    chance = random.Random(seed)
    valid = list(target.frames)
    for frame in valid:
        target.run(frame)
        yield frame
    while True:
        frame = damaged(chance.choice(chance.choice([valid, target.frames])), target.frames, chance)
        try:
            target.run(frame)
        except Exception:
            sys.stdout.write(f"\n{target.name}, seed {seed}:\n{frame}\n\n{traceback.format_exc()}")
            raise
        yield frame


def main() -> int:
    """Fuzz each decoder for its part of the time."""
    parser = argparse.ArgumentParser(description="Fuzz the decoders of binary and of compressed bodies.")
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="to repeat a run")
    options = parser.parse_args()
    for make in TARGETS.values():
        target, end = make(), time.monotonic() + options.seconds / len(TARGETS)
        try:
            for _ in fuzz(target, options.seed):
                if time.monotonic() > end:
                    break
        except Exception:
            return 1
        sys.stdout.write(report(target, options.seed))
    return 0


def report(target: Target, seed: int) -> str:
    """How many frames were tried, and what became of them."""
    kinds: Counter[str] = Counter()
    for outcome, count in target.outcomes.items():
        kinds[outcome.partition(":")[0]] += count
    head = f"{target.name}, seed {seed}: {kinds.total():,} frames, {len(target.outcomes):,} different outcomes\n"
    return head + "".join(f"{count:>12,}  {kind}\n" for kind, count in kinds.most_common(12))


if __name__ == "__main__":
    sys.exit(main())
