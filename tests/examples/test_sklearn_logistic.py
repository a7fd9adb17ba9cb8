"""The example that fits scikit-learn's LogisticRegression in three processes, run as a user runs it."""

from __future__ import annotations

import re

from tests.examples.running import run, shared


def test_the_example_fits_as_scikit_learn_does() -> None:
    with shared("coef") as url:
        done = run("sklearn_logistic", "--url", url)
        assert done.returncode == 0, done.stderr
    (sums,) = re.findall(r"3 processes made (\d+) sums", done.stdout)
    assert int(sums) > 50
    (accuracy,) = re.findall(r"held-out accuracy: (.*)%", done.stdout)
    assert float(accuracy) > 90
    (difference,) = re.findall(r"scikit-learn's own fit: (\S+)", done.stdout)
    assert float(difference) <= 1e-7
