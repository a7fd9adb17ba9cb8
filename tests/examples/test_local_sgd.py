"""The example that trains with local steps and pseudo-gradients, run as a user runs it."""

from __future__ import annotations

import re

from tests.examples.running import run, shared

PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


def test_local_steps_learn_the_digits_with_a_tenth_of_the_bytes() -> None:
    with shared("0.weight") as url:
        done = run("local_sgd", "--steps", "40", "--url", url)
        assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +([\d,]+) +([\d.]+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["data_parallel", "local_steps"]
    together, local = (int(sent.replace(",", "")) for _, sent, _, _ in rows)
    assert together == 4 * 40 * 4 * PARAMETERS  # workers, steps, bytes of a float32
    assert local == 4 * 4 * 4 * PARAMETERS
    assert all(float(loss) < 0.7 and float(accuracy) > 85 for _, _, loss, accuracy in rows)
    assert "local steps sent 1/10 of the bytes" in done.stdout


def test_steps_that_are_no_whole_rounds_are_refused() -> None:
    done = run("local_sgd", "--steps", "15")
    assert done.returncode == 2
    assert "--steps is 15, but must be a multiple of 10" in done.stderr
