// One run: its workers, its loss and its norm by step, and its buffers as a tree.

import { empty, h, put, say } from "./dom.js";
import { stepChart } from "./steps.js";
import { known } from "./known.js";
import { follow, Listed } from "./listed.js";
import { tellState } from "./runs.js";
import { BufferTable } from "./table.js";
import { stateOf } from "./training.js";
import { sameIn } from "./tree.js";
import * as words from "./words.js";
import { Running } from "./workers.js";

/** Buffers whose kept steps are read when the page opens: each is a request. */
const MAX_HISTORIES = 60;

export async function show(main, { api, signal, parameters }) {
  const leave = (event) => {
    if (event.key === "Escape" && !event.target.matches("input, select")) location.hash = "#/runs";
  };
  document.addEventListener("keydown", leave, { signal });
  await follow(new Run(main, api, signal, parameters), signal);
}

class Run {
  constructor(main, api, signal, { name, query }) {
    Object.assign(this, { main, api, signal, name, query, run: null, charts: new Map() });
    this.listed = new Listed(api, signal);
  }

  async read() {
    this.run = (await this.listed.readRuns()).find(({ name }) => name === this.name) ?? null;
    if (this.run === null) return this.gone();
    const { infos, gradients, losses, begun } = this.run;
    const isFirst = !this.page?.isConnected;
    if (isFirst) this.build();
    this.table.set(infos, "", sameIn(infos));
    this.tick();
    const few = isFirst && gradients.length <= MAX_HISTORIES ? gradients.filter(({ keep }) => keep > 1) : [];
    for (const info of [...losses, ...few]) await known.readSteps(info, this);
    await known.ask(begun ? [begun, ...infos] : infos, this);
    this.tick();
  }

  gone() {
    const text = "It was deleted, or is in another namespace. It appears here once a worker joins it.";
    put(this.main, empty(`No run is called ${this.name}`, text, h("a", { href: "#/runs" }, "All runs")));
  }

  build() {
    this.state = h("span");
    this.running = new Running("Workers", ["step", "count", "weight", "deadline", "adds/s", "updated"]);
    this.graphs = h("div", { class: "panels" }, this.chart("norm", "Norm", "of the mean gradient, by closed step"));
    this.table = new BufferTable({
      label: `Buffers of ${this.name}`,
      api: this.api,
      signal: this.signal,
      query: this.query,
      prefix: this.run.prefix,
      changed: () => history.replaceState(null, "", `${location.hash.split("?")[0]}?${this.table.query}`),
    });
    this.summary = h("p", { class: "summary muted" });
    const { field, order, asTree } = this.table;
    const line = h("div", { class: "line" }, field, order, asTree);
    const tools = h("div", { class: "tools" }, h("h2", {}, "Buffers"), this.summary, line);
    const crumbs = h("nav", { class: "crumbs", "aria-label": "Place" }, h("a", { href: "#/runs" }, "Runs"));
    this.page = h("div", { class: "run" }, this.running.element, this.graphs, h("div", {}, tools, this.table.elements));
    const title = h("div", {}, crumbs, h("h1", {}, this.name));
    put(this.main, h("header", { class: "title" }, title, this.state), this.page);
  }

  /** Return a panel with a chart of `label`. */
  chart(label, title, note) {
    const chart = stepChart(label, this.signal);
    this.charts.set(title, chart);
    return h("section", { class: "panel" }, h("h2", {}, title, h("span", { class: "muted" }, note)), chart.element);
  }

  tick() {
    if (this.signal.aborted || !this.page?.isConnected) return;
    this.table.grid.draw();
    const { run } = this;
    const [now, begun] = [this.api.now(), known.begun(run)];
    const state = stateOf(run, known.illness(run), now);
    tellState(this.state, state);
    const rate = this.listed.rate(run.infos);
    const step = (run.step + begun).toLocaleString("en");
    const isOver = !state.isActive || run.ended !== null;
    this.running.draw(run, now, { step, "adds/s": rate === null ? "–" : words.general(rate, 3), isOver });
    const curve = (infos) => known.curve(infos).map((each) => ({ ...each, step: each.step + begun }));
    this.charts.get("Norm").set(curve(run.gradients));
    for (const loss of run.losses) {
      const title = loss.name.slice(run.prefix.length);
      if (!this.charts.has(title)) this.graphs.prepend(this.chart("loss", title, "mean of each closed step"));
      this.charts.get(title).set(curve([loss]));
    }
    say(this.summary, `${words.many(run.infos.length, "buffer")}, ${words.size(run.bytes)}`);
  }
}
