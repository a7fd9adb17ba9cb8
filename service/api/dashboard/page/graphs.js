// All graphs, as a table; with a name in the address, one of them.

import { h, put, say, scroller, table } from "./dom.js";
import { distance, many, nodes, size, time } from "./words.js";

export async function show(main, { api, caller, signal, parameters }) {
  if (parameters.name !== null) {
    const { show: showOne } = await import("./graph.js");
    return showOne(main, { api, caller, signal, name: parameters.name });
  }
  const graphs = await api.all("graphs", { signal });
  const count = h("span", { class: "muted" }, many(graphs.length, "graph"));
  const none = ["No graphs yet: ", code("PUT v1/graphs/NAME"), " uploads an ONNX model, if the server has "];
  put(
    main,
    h("div", { class: "line top" }, h("h1", {}, "Graphs"), graphs.length > 0 && count),
    graphs.length
      ? h("section", { class: "panel" }, tableOf(graphs, { api, signal }))
      : h("p", {}, none, code("gradserve[graphs]"), "."),
  );
}

const code = (text) => h("code", {}, text);

/** The server plans a graph to describe it, so the page asks for the rows that come into sight, one after another. */
function tableOf(graphs, { api, signal }) {
  const number = (title) => h("th", { scope: "col", class: "number" }, title);
  const heads = ["name", "kind", number("nodes"), number("parameters"), number("bytes"), "uploaded"];
  const fault = h("p", { class: "bad", role: "status" });
  const rows = new Map(graphs.map((each) => [rowOf(each, api.now()), each.name]));
  let queue = Promise.resolve();
  const observer = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter((each) => each.isIntersecting)) {
      observer.unobserve(target);
      queue = queue.then(() => signal.aborted || describe(target, rows.get(target)));
    }
  });
  async function describe(row, name) {
    try {
      const graph = await api.get(`v1/graphs/${encodeURIComponent(name)}`, { signal });
      const counts = [nodes(graph), Object.keys(graph.parameters).length].map((count) => count.toLocaleString("en"));
      [graph.kind, ...counts].forEach((text, place) => say(row.cells[place + 1], text));
    } catch (error) {
      if (!signal.aborted) say(fault, error.message);
    }
  }
  for (const row of rows.keys()) observer.observe(row);
  signal.addEventListener("abort", () => observer.disconnect());
  return [fault, scroller("Graphs", "graphs", table("plain", heads, [...rows.keys()]))];
}

function rowOf({ name, bytes, created_at: at }, now) {
  const link = h("a", { href: `#/graphs/${encodeURIComponent(name)}` }, name);
  const number = (text) => h("td", { class: "number" }, text);
  const uploaded = h("td", { title: time(at) }, distance(Math.min(at, now), now));
  return h("tr", {}, h("th", { scope: "row" }, link), h("td"), number(), number(), number(size(bytes)), uploaded);
}
