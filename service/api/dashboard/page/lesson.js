// What the page shows before there is a buffer: how to make one.

import { copyBox } from "./copy.js";
import { h } from "./dom.js";

const GUIDES = "https://github.com/gradserve/gradserve/tree/main/docs";

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
    "H='Content-Type: application/json'",
    `url=${url}/v1/buffers/layer.weight`,
    `curl -X PUT $url${key} -H "$H" -d '{"shape": [2, 2], "quorum": 3}'`,
    `curl $url/accumulate${key} -H "$H" -d '{"gradient": [[1, 2], [3, 4]]}'`,
  ];
  const may = caller.scopes.includes("buffers:write");
  return h(
    "section",
    { class: "empty lesson" },
    h("h1", {}, "No buffers yet"),
    h("p", {}, "A buffer sums gradients under a name. It appears here once it is made, and fills as gradients come."),
    !may &&
      h("p", { class: "late" }, "Your API key lacks the scope buffers:write, so another key must make the first one."),
    block("Python", python),
    block("curl", shell, "wrap"),
    caller.keys && h("p", { class: "muted" }, "Both read the API key from the variable GRADSERVE_API_KEY."),
    h("p", {}, link(GUIDES, "The guides"), " show how to train; ", link("docs", "the API"), " lists every request."),
  );
}

const link = (href, text) => h("a", { href }, text);

function block(title, lines, kind) {
  const box = copyBox(title, "", kind);
  box.show(lines.join("\n"));
  return box.element;
}
