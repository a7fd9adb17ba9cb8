// What the page shows before there is a buffer: how to make one.

import { h } from "./dom.js";

/** Return a lesson for the caller: three lines of Python, or of a shell. */
export function lesson(caller) {
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  const key = caller.keys ? ' -H "Authorization: Bearer $GRADSERVE_API_KEY"' : "";
  const python = [
    "from gradserve_client import Client",
    "",
    `with Client("${url}") as server:`,
    '    layer = server.buffers["layer.weight"]',
    "    layer.create((2, 2), quorum=3)",
    "    layer.accumulate([[1, 2], [3, 4]])",
  ];
  const shell = [
    `url=${url}/v1/buffers/layer.weight`,
    `curl -X PUT $url${key} --json '{"shape": [2, 2], "quorum": 3}'`,
    `curl $url/accumulate${key} --json '{"gradient": [[1, 2], [3, 4]]}'`,
  ];
  const may = caller.scopes.includes("buffers:write");
  return h(
    "section",
    { class: "empty lesson" },
    h("h1", {}, "No buffers yet"),
    h(
      "p",
      {},
      "A buffer sums gradients under a name. It appears here as soon as it is made, and fills as gradients come.",
    ),
    !may &&
      h("p", { class: "late" }, "Your API key lacks the scope buffers:write, so another key must make the first one."),
    h("h2", {}, "From Python"),
    h("pre", { tabindex: "0" }, h("code", {}, python.join("\n"))),
    h("h2", {}, "From a shell"),
    h("pre", { tabindex: "0" }, h("code", {}, shell.join("\n"))),
    caller.keys && h("p", { class: "muted" }, "Both read the API key from the variable GRADSERVE_API_KEY."),
  );
}
