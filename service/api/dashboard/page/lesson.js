// What the page shows before there is a run or a buffer: a training that ends.

import { copyBox } from "./copy.js";
import { h } from "./dom.js";

const GUIDES = "https://github.com/gradserve/gradserve/tree/main/docs";

/** Return a lesson for the caller under a title: a loop in Python. */
export function lesson(caller, title) {
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  const box = copyBox("Python", "");
  box.show(`import numpy as np
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator

w, x = np.zeros(2), np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
with Client("${url}") as server:
    gradients = GradientAccumulator(w, server, run="line", loss=True)
    for _ in range(100):
        error = x @ w - [1, 3, 5]
        gradients.push(2 * error @ x / 3, weight=3, loss=np.mean(error**2))
        w -= 0.2 * gradients.pull()
    gradients.finish()`);
  const key = "It reads the API key from the variable GRADSERVE_API_KEY.";
  const lacks = "Your API key lacks the scope buffers:write, so another key must make the first one.";
  return h(
    "section",
    { class: "empty lesson" },
    h("h1", {}, title),
    h("p", {}, "This loop fits a line. Its run appears here, and is over after a hundred steps."),
    !caller.scopes.includes("buffers:write") && h("p", { class: "late" }, lacks),
    box.element,
    caller.keys && h("p", { class: "muted" }, key),
    h("p", {}, link(GUIDES, "The guides"), " show how to train; ", link("docs", "the API"), " lists every request."),
  );
}

const link = (href, text) => h("a", { href }, text);
