"""The example that trains with local steps and pseudo-gradients, run as a user runs it."""

from __future__ import annotations

import re

from tests.examples.running import run, shared

PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


CODED = 64 * 64 * 65 // 64 + 4 * (64 + 64 * 10 + 10)
"""The bytes of a push whose large tensor has 8 bits a number, and a float32 for each 256."""


def test_local_steps_learn_the_digits_with_few_bytes() -> None:
    with shared("0.weight") as url:
        done = run("local_sgd", "--steps", "40", "--url", url)
        assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +([\d,]+) +([\d.]+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["data_parallel", "local_steps"]
    together, local = (int(sent.replace(",", "")) for _, sent, _, _ in rows)
    assert 1 < together / (4 * 40 * 4 * PARAMETERS) < 1.1  # workers, steps, bytes of a float32; and names and tallies
    assert 1 < local / (4 * 4 * CODED) < 1.2
    assert all(float(loss) < 0.7 and float(accuracy) > 85 for _, _, loss, accuracy in rows)
    assert re.search(r"local steps sent 1/2[4-8] of the bytes", done.stdout)


def test_steps_that_are_no_whole_rounds_are_refused() -> None:
    done = run("local_sgd", "--steps", "15")
    assert done.returncode == 2
    assert "--steps is 15, but must be a multiple of 10" in done.stderr
