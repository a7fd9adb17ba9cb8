// One graph: what it takes and gives, its nodes by kind, its parameters, and the runs that train them.

import { h, put, scroller, table } from "./dom.js";
import { bar, setBar } from "./progress.js";
import { followRuns } from "./runs.js";
import * as words from "./words.js";

export async function show(main, { api, caller, signal, name }) {
  document.title = `${name} – gradserve`;
  const graph = await api.get(`v1/graphs/${encodeURIComponent(name)}`, { signal });
  const runs = h("div");
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Place" }, h("a", { href: "#/graphs" }, "Graphs"));
  const panel = (title, content) => h("section", { class: "panel" }, h("h2", {}, title), content);
  put(
    main,
    h("header", { class: "title" }, h("div", {}, crumbs, h("h1", {}, name), summary(graph, api.now()))),
    graph.doubts.length > 0 && panel("Doubts", doubts(graph)),
    h(
      "div",
      { class: "buffer" },
      h("div", {}, panel("Runs", runs), panel("Parameters", parameters(graph))),
      h("div", {}, panel("Nodes", nodes(graph)), panel("Tensors", signature(graph))),
    ),
  );
  const say = (text) => h("p", { class: "muted" }, text);
  if (!caller.scopes.includes("buffers:read"))
    return put(runs, say("Runs are buffers: your API key lacks buffers:read."));
  const none = `No buffers have its parameters yet: set=parameters:${name}.p.* writes them.`;
  await followRuns(runs, { api, signal, none: () => say(none), isShown: (run) => trains(run, graph) });
}

function doubts({ doubts }) {
  const text = "An exporter seems to have changed the parameters, so training changes another model: ";
  const way = h("code", {}, "torch.onnx.export(net, args, path, dynamo=True, optimize=False)");
  return [h("p", { class: "bad" }, text, way, " keeps them."), h("ul", {}, doubts.map((each) => h("li", {}, each)))];
}

/** Return whether the run has a buffer, as exp1.p.NAME, for each parameter of the graph. */
function trains({ prefix, infos }, { parameters }) {
  const known = new Map(infos.map((info) => [info.name, info]));
  const fits = (shape, wanted) => wanted?.every((length, place) => [null, shape[place]].includes(length)) ?? true;
  const isIn = ([name, { shape }]) => {
    const info = known.get(`${prefix}p.${name}`);
    return info !== undefined && fits(info.shape, shape);
  };
  return Object.keys(parameters).length > 0 && Object.entries(parameters).every(isIn);
}

function summary(graph, now) {
  const { loss, train } = graph.options;
  const texts = [
    graph.kind,
    loss && `loss ${loss}`,
    train && `train ${train}`,
    words.many(words.nodes(graph), "node"),
    words.many(Object.keys(graph.parameters).length, "parameter"),
    words.size(graph.bytes),
    `uploaded ${words.distance(Math.min(graph.created_at, now), now)}`,
  ];
  return h("p", { class: "summary muted" }, texts.filter(Boolean).map((text) => h("span", {}, text)));
}

/** The plain tensors, and each group in one row. */
function signature({ inputs, outputs, parameters, statistics, gradients }) {
  const group = (name, count) =>
    h("tr", {}, head(h("code", {}, `${name}.*`)), h("td", { colspan: 2 }, words.many(count, "tensor")));
  const part = (title, tensors, groups) => {
    const counts = Object.entries(groups).map(([name, some]) => [name, Object.keys(some).length]);
    return table("plain signature", [title, "dtype", "shape"], [
      ...Object.entries(tensors).map(([name, tensor]) => row(h("code", {}, name), tensor)),
      ...counts.filter(([, count]) => count).map((each) => group(...each)),
    ]);
  };
  const takes = part("Input", inputs, { parameters, statistics });
  return scroller("Inputs and outputs", "", takes, part("Output", outputs, { gradients, statistics }));
}

const head = (content) => h("th", { scope: "row" }, content);

/** A tensor; its shape has "?" for a length that is open. */
function row(name, { dtype, shape }) {
  const text = shape === null ? "any" : words.shape(shape.map((length) => length ?? "?"));
  return h("tr", {}, head(name), h("td", {}, dtype), h("td", { class: "mono" }, text));
}

function parameters(graph) {
  const rows = Object.entries(graph.parameters).map(([name, tensor]) => row(name, tensor));
  return rows.length ? scroller("Parameters", "listed", table("plain", ["name", "dtype", "shape"], rows)) : "none";
}

function nodes(graph) {
  const most = Math.max(...Object.values(graph.nodes));
  const rows = Object.entries(graph.nodes).map(([kind, count]) => {
    const track = bar();
    setBar(track, count / most, false);
    const number = h("td", { class: "number" }, count.toLocaleString("en"));
    return h("tr", {}, head(h("code", {}, kind)), number, h("td", { class: "share" }, track));
  });
  const heads = ["kind", h("th", { scope: "col", class: "number" }, "nodes"), h("td")];
  return scroller("Nodes by kind", "listed", table("plain", heads, rows));
}
