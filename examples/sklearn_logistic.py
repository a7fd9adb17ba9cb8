"""Three processes fit scikit-learn's LogisticRegression to rows that none of them has all of.

SciPy's L-BFGS runs in every process. Whenever it asks for the loss and its gradient, each process pushes those of its
own rows, and pulls the sum of all. All get the same bits, so they take the same steps. In the end the coefficients are
compared with those of scikit-learn itself on all rows.

    python examples/sklearn_logistic.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import sys
import uuid
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
from _server import server as running_server  # type: ignore[import-not-found]  # it lies beside this file
from digits_data_parallel import Digits, load  # type: ignore[import-not-found]  # it lies beside this file
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator
from scipy.optimize import minimize
from scipy.special import log_softmax

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WORKERS = 3
CLASSES, PIXELS = 10, 64
PENALTY = 20.0  # 1 / C
TOLERANCE = 1e-4  # of the gradient of the summed loss

LARGEST_DIFFERENCE = 1e-7
"""The difference of a probability between two places near the optimum."""


def loss_and_gradients(coef: Array, intercept: Array, images: Array, labels: Array) -> dict[str, Array]:
    """Return the summed loss of these rows, and its gradients, in float64."""
    logs = log_softmax(images @ coef.T + intercept, axis=1)
    rows = np.arange(len(images))
    errors = np.exp(logs)
    errors[rows, labels] -= 1
    return {"loss": -logs[rows, labels].sum(), "coef": errors.T @ images, "intercept": errors.sum(axis=0)}


def work(rank: int, url: str, run: str, digits: Digits) -> tuple[Array, Array]:
    """Fit as one of the processes, with a third of the rows; return `coef_` and `intercept_`."""
    images = np.array_split(digits.images.astype(np.float64), WORKERS)[rank]
    labels = np.array_split(digits.labels, WORKERS)[rank]
    zeros = {"loss": np.zeros(()), "coef": np.zeros((CLASSES, PIXELS)), "intercept": np.zeros(CLASSES)}
    with Client(url) as server:
        accumulator = GradientAccumulator(zeros, server, run=run, quorum=WORKERS, worker=f"rank{rank}", reduce="sum")

        def objective(x: Array) -> tuple[float, Array]:
            coef, intercept = parts(x)
            accumulator.push(loss_and_gradients(coef, intercept, images, labels))
            found = accumulator.pull()
            loss = found["loss"] + PENALTY / 2 * (coef**2).sum()
            return loss, np.concatenate([(found["coef"] + PENALTY * coef).ravel(), found["intercept"]])

        start = np.zeros(CLASSES * (PIXELS + 1))
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"gtol": TOLERANCE, "ftol": 0.0})
    return parts(found.x)


def parts(x: Array) -> tuple[Array, Array]:
    """Return `coef_` and `intercept_` from what L-BFGS moves."""
    return x[: CLASSES * PIXELS].reshape(CLASSES, PIXELS), x[CLASSES * PIXELS :]


def fit_together(url: str, digits: Digits) -> tuple[Array, Array]:
    """Fit in all processes; return the coefficients, after a check that all have the same bits."""
    run = f"sklearn_logistic-{uuid.uuid4().hex[:8]}"
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        (coef, intercept), *others = workers.map(partial(work, url=url, run=run, digits=digits), range(WORKERS))
    with Client(url) as server:
        steps = server.buffers[f"{run}.coef"].info().step
        server.buffers.delete(prefix=f"{run}.")
    print(f"{WORKERS} processes made {steps} sums of their gradients")
    if not all(np.array_equal(coef, one) and np.array_equal(intercept, other) for one, other in others):
        sys.exit("The workers ended with different coefficients")
    return coef, intercept


def main() -> None:
    from sklearn.linear_model import LogisticRegression  # here, because workers start faster without scikit-learn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    options = parser.parse_args()
    digits = load()
    alone = LogisticRegression(C=1 / PENALTY, tol=TOLERANCE / len(digits.images), max_iter=1000)
    alone.fit(digits.images.astype(np.float64), digits.labels)
    together = LogisticRegression(C=1 / PENALTY)
    with running_server(options.url) as url:
        together.coef_, together.intercept_ = fit_together(url, digits)
    together.classes_ = alone.classes_
    images = digits.held_out_images.astype(np.float64)
    difference = np.abs(together.predict_proba(images) - alone.predict_proba(images)).max()
    print(f"held-out accuracy: {together.score(images, digits.held_out_labels):.1%}")
    print(f"largest difference of a probability from scikit-learn's own fit: {difference:.1e}")
    if not difference <= LARGEST_DIFFERENCE:
        sys.exit("The fit is not that of scikit-learn")


if __name__ == "__main__":
    main()
