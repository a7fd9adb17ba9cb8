"""The fuzzer itself: it runs, its frames are refused as often as read, and it finds what it is for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from service.errors import GradserveError
from tests.fuzz.decoders import TARGETS, Target, fuzz, of_safetensors, report


@pytest.mark.parametrize("name", TARGETS)
def test_it_reads_valid_frames_and_damages_them_in_many_ways(name: str) -> None:
    target = TARGETS[name]()
    valid, errors = len(target.frames), 12 if name in ("gzip", "deflate") else 30  # zlib has few errors
    tried = list(islice(fuzz(target, seed=1), 1000))
    assert len(set(tried)) > (780 if errors == 12 else 850)
    assert len([outcome for outcome in target.outcomes if "tensors" not in outcome]) > errors
    assert len(target.frames) > valid + errors
    assert report(target, 1).startswith(f"{target.name}, seed 1: 1,000 frames")


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_all_valid_frames_are_read(make: Callable[[], Target]) -> None:
    target = make()
    list(islice(fuzz(target, seed=1), len(target.frames)))
    assert all(outcome.endswith(" tensors") for outcome in target.outcomes)


def test_it_shows_the_frame_that_does_harm(capsys: pytest.CaptureFixture[str]) -> None:
    target = of_safetensors()
    decode = target.decode

    def broken(frame: object) -> object:
        try:
            return decode(frame)  # type: ignore[arg-type]
        except GradserveError as error:
            raise KeyError(error.detail) from None

    target.decode = broken  # type: ignore[assignment]
    with pytest.raises(KeyError):
        list(islice(fuzz(target, seed=1), 1000))
    shown = capsys.readouterr().out
    assert "safetensors, seed 1:\nFrame(head=b'" in shown
    assert "KeyError" in shown
