// One run: its workers, its loss and its norm by step, and its buffers as a tree.

import { h, put, say } from "./dom.js";
import { stepChart } from "./steps.js";
import { known } from "./known.js";
import { follow, Listed } from "./listed.js";
import { tellState } from "./runs.js";
import { BufferTable } from "./table.js";
import { runsOf, stateOf, Steps } from "./training.js";
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
    Object.assign(this, { main, api, signal, name, query, run: null, charts: new Map(), histories: new Map() });
    this.listed = new Listed(api, signal);
    this.steps = new Steps(api, signal);
  }

  async read() {
    await this.listed.read();
    this.run = runsOf(this.listed.infos).find(({ name }) => name === this.name) ?? null;
    if (this.run === null) return this.gone();
    const { infos, gradients, losses } = this.run;
    if (!this.page?.isConnected) this.build();
    this.table.set(infos, "", sameIn(infos));
    this.tick();
    await this.steps.read([this.run]);
    await known.ask(infos, this);
    for (const info of losses) await this.readHistory(info);
    const few = gradients.length <= MAX_HISTORIES ? gradients.filter(({ keep }) => keep > 1) : [];
    for (const info of few) await this.readHistory(info, true);
    this.tick();
  }

  /** Read the steps that a buffer keeps, if any has closed since the last time; or `once` only. */
  async readHistory(info, once = false) {
    const state = `${info.created_at}/${once ? "" : info.step}`;
    if (this.histories.get(info.name) === state || !info.closed_steps.length) return;
    await known.readSteps(info, this);
    this.histories.set(info.name, state);
  }

  gone() {
    const text = "A run is the buffers whose names begin alike: exp1.layer.weight belongs to exp1.";
    const back = h("p", {}, h("a", { href: "#/runs" }, "All runs"));
    const title = h("h1", {}, `No run is called ${this.name}`);
    put(this.main, h("section", { class: "empty", role: "alert" }, title, h("p", {}, text), back));
  }

  build() {
    this.state = h("a");
    this.running = new Running("Workers", ["step", "count", "weight", "deadline", "adds/s", "updated"]);
    this.unnamed = h("p", { class: "muted" }, "The workers have not given their names.");
    this.running.element.append(this.unnamed);
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

  /** Return a panel with a chart of `label`, and words in place of it while there is nothing to draw. */
  chart(label, title, note) {
    const chart = stepChart(label, this.signal);
    const none = h("p", { class: "muted" }, "No step has closed yet.");
    this.charts.set(title, (steps) => {
      const known = steps.filter((each) => each[label] !== null);
      [none.hidden, chart.element.hidden] = [known.length > 0, known.length === 0];
      if (known.length) chart.set(known);
    });
    const head = h("h2", {}, title, h("span", { class: "muted" }, note));
    return h("section", { class: "panel" }, head, chart.element, none);
  }

  tick() {
    if (this.signal.aborted || !this.page?.isConnected) return;
    this.table.grid.draw();
    const { run } = this;
    const [now, info] = [this.api.now(), run.behind];
    tellState(this.state, run, stateOf(run, known.ill(run.infos).length, now));
    const rate = this.listed.rate(run.infos);
    this.running.draw(info, now, {
      step: (this.steps.of(run) ?? info.step).toLocaleString("en"),
      "adds/s": rate === null ? "–" : words.general(rate, 3),
      updated: words.distance(Math.min(run.moved, now), now),
    });
    this.unnamed.hidden = this.running.people.children.length > 0;
    this.charts.get("Norm")(known.curve(run.gradients));
    for (const loss of run.losses) {
      const title = loss.name.slice(run.prefix.length);
      if (!this.charts.has(title)) this.graphs.prepend(this.chart("loss", title, "mean of each closed step"));
      this.charts.get(title)(known.curve([loss]));
    }
    say(this.summary, `${words.many(run.infos.length, "buffer")}, ${words.size(run.bytes)}`);
  }
}
