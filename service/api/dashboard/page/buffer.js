// One buffer: its step, its numbers, and what can be done to it.

import { actions, path } from "./actions.js";
import { empty, failure, h, put, say } from "./dom.js";
import { stepChart } from "./steps.js";
import { heatMap } from "./heat.js";
import { histogram } from "./histogram.js";
import { bad } from "./known.js";
import { Receipts } from "./receipts.js";
import { repeat } from "./repeat.js";
import { cameFrom } from "./table.js";
import * as words from "./words.js";
import { Running } from "./workers.js";

/** Cells of the heat map along each axis, at most. */
const HEAT_CELLS = 64;

/** Seconds between two readings. */
const READ_SECONDS = 2;

export async function show(main, { api, caller, signal, parameters }) {
  const view = new Buffer(main, api, caller, signal, parameters.name);
  document.addEventListener(
    "keydown",
    (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog"))
        location.hash = cameFrom();
    },
    { signal },
  );
  await repeat(signal, READ_SECONDS, () => view.read(), (error) => view.failed(error));
}

class Buffer {
  constructor(main, api, caller, signal, name) {
    Object.assign(this, { main, api, caller, signal, name });
    this.info = this.tag = this.statistics = this.state = null;
    this.steps = [];
    this.of = null; // "running" or "closed": what the statistics are of
    this.page = null;
  }

  // ----- what the server says -----

  async read() {
    const answer = await this.api.request(path(this.name), { signal: this.signal });
    const info = await answer.json();
    if (this.info?.created_at !== info.created_at) [this.page, this.steps] = [null, []];
    [this.info, this.tag] = [info, answer.headers.get("ETag")];
    if (this.page === null || !this.page.isConnected) this.build();
    this.draw();
    await this.readStatistics();
    await this.closed.show(info, this.steps);
  }

  /** Read the statistics of what the reader chose: at first of the last closed step, if any, because it is whole. */
  async readStatistics() {
    const { step, version, closed_steps: closed } = this.info;
    this.of ??= closed.length ? "closed" : "running";
    const state = this.of === "running" ? `${step}-${version}` : `closed ${closed.at(-1)}`;
    const before = state === this.state ? this.statistics.steps.length : 0;
    if (state === this.state && !this.more) return;
    const query = new URLSearchParams({ heat_map: HEAT_CELLS, closed: this.of === "closed" });
    this.statistics = await this.api.get(path(this.name, `/statistics?${query}`), { signal: this.signal });
    const { steps } = this.statistics;
    this.state = state;
    this.more = steps.length > before && steps.length < closed.length; // the server computes a few at a time
    const known = new Map([...this.steps, ...steps].map((each) => [each.step, each]));
    this.steps = [...known.values()].sort((a, b) => a.step - b.step);
    this.drawStatistics();
  }

  failed(error) {
    if (error.status === undefined || error.status === 401 || error.status >= 500) return; // the frame says so
    this.page = null;
    const back = h("a", { href: "#/buffers" }, "All buffers");
    if (error.status !== 404) return put(this.main, failure(error), h("div", { class: "empty" }, h("p", {}, back)));
    const text = "It was deleted, has expired, or is in another namespace. It appears here once a client creates it.";
    return put(this.main, empty(`No buffer is called ${this.name}`, text, back));
  }

  // ----- what the reader sees -----

  build() {
    const panel = (title, note, content, kind = "") =>
      h("section", { class: `panel ${kind}` }, h("h2", {}, title, note), content);
    const aside = (text) => h("span", { class: "muted" }, text);
    this.state = null;
    this.running = new Running("", ["count", "weight", "deadline", "updated"]);
    const options = [h("option", { value: "running" }, "the running sum"), h("option", { value: "closed" })];
    this.choice = h("select", { "aria-label": "Values of" }, options);
    this.choice.addEventListener("change", () => {
      [this.of, this.state] = [this.choice.value, null];
      this.readStatistics().catch((error) => this.failed(error));
    });
    this.tiles = h("dl", { class: "tiles values" });
    this.bars = h("div", {}, h("p", { class: "muted" }, "Not computed yet."));
    this.norms = stepChart("norm", this.signal);
    this.heat = h("div");
    this.facts = h("dl", { class: "facts" });
    const closed = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Closed steps" });
    this.closed = new Receipts(closed, this.api, this.signal);
    const left = [
      this.running.element,
      panel("Norm", aside("by step"), this.norms.element),
      panel("Closed steps", aside("the last ones"), closed),
      panel("Rules and state", null, this.facts),
    ];
    const right = [
      panel("Values", this.choice, this.tiles, "first"),
      panel("Magnitudes", aside("elements by size"), this.bars, "first"),
      panel("Heat map", null, this.heat),
    ];
    this.page = h("div", { class: "buffer" }, h("div", {}, left), h("div", {}, right));
    const crumbs = h("nav", { class: "crumbs", "aria-label": "Place" }, crumb());
    const buttons = actions({
      api: this.api,
      caller: this.caller,
      seen: () => ({ info: this.info, tag: this.tag }),
      changed: () => this.read().catch((error) => this.failed(error)),
      deleted: () => (location.hash = "#/buffers"),
    });
    put(this.main, h("header", { class: "title" }, h("div", {}, crumbs, h("h1", {}, this.name)), buttons), this.page);
    this.map = heatMap(this.heat, this.signal);
    clearInterval(this.clock);
    this.clock = setInterval(() => document.visibilityState === "visible" && this.draw(), 1000);
    this.signal.addEventListener("abort", () => clearInterval(this.clock));
  }

  draw() {
    const { info } = this;
    say(this.running.title, `Step ${info.step}`);
    this.running.draw(info, this.api.now());
    const [, ...facts] = words.fields(info);
    put(this.facts, facts.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
  }

  drawStatistics() {
    const known = this.statistics;
    this.choice.value = this.of;
    const last = this.of === "closed" && this.info.closed_steps.length ? known.step : null;
    say(this.choice.options[1], last === null ? "the last closed step" : `step ${last}, closed last`);
    this.choice.options[1].disabled = this.info.closed_steps.length === 0;
    const number = (value) => (value === null ? "none" : words.general(value, 4));
    const [ill, others] = [bad(known), known.nan + known.infinite];
    const tiles = [
      ["norm", number(ill ?? known.norm), ill !== null],
      ["min", number(known.min ?? ill)],
      ["max", number(known.max ?? ill)],
      ["mean", number(ill ?? known.mean), ill !== null],
      ["non-finite", words.share(others, known.size), others > 0],
      ["zeros", words.share(known.zeros, known.size)],
    ];
    put(
      this.tiles,
      tiles.map(([name, text, red]) => h("div", {}, h("dt", {}, name), h("dd", { class: red ? "bad" : null }, text))),
    );
    histogram(this.bars, known.histogram);
    this.norms.set(this.steps.map((each) => ({ ...each, norm: bad(each) ?? each.norm })));
    if (known.heat_map) this.map.set(known.heat_map, this.info.shape);
  }
}

/** Return a link to the view that the reader came from. */
function crumb() {
  const run = /^#\/runs\/([^?]+)/.exec(cameFrom());
  return h("a", { href: cameFrom() }, run ? decodeURIComponent(run[1]) : "Buffers");
}
