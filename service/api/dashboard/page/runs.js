// The runs of a graph among the buffers: prefixes, such as "exp1.", with a buffer "exp1.p.NAME" for each parameter.

import { path } from "./actions.js";
import { address } from "./columns.js";
import { h, mark, put, say } from "./dom.js";
import { epochChart } from "./epochs.js";
import { bar, isLate, progress, setBar } from "./progress.js";
import { byName } from "./tree.js";
import * as words from "./words.js";

/** Closed epochs whose losses the page remembers, also of those that the buffer keeps no longer. */
const MAX_EPOCHS = 200;

const TILES = ["steps", "epoch", "count", "missing", "last loss"];

/** Two panels with one run, which the reader chooses, and its losses. */
export class Runs {
  constructor(graph, api, signal) {
    Object.assign(this, { graph, api, signal, chosen: null });
    [this.rows, this.seen] = [new Map(), new Map()];
    this.choice = h("select", { "aria-label": "Run" });
    this.choice.addEventListener("change", () => {
      this.chosen = this.choice.value;
      this.draw().catch(() => {}); // the next reading tries again
    });
    this.values = TILES.map(() => h("dd"));
    this.track = bar();
    this.words = h("p", { class: "muted" });
    this.chart = epochChart("loss", signal);
    const tiles = TILES.map((title, place) => h("div", {}, h("dt", {}, title), this.values[place]));
    this.tiles = h("dl", { class: "tiles" }, tiles);
    const title = h("h2", {}, "Loss", h("span", { class: "muted" }, "mean of each closed epoch"));
    this.loss = h("section", { class: "panel" }, title, this.chart.element);
    const head = h("h2", {}, "Run", this.choice);
    const run = h("section", { class: "panel running" }, head, this.tiles, this.track, this.words);
    this.elements = [run, this.loss];
    this.say("Reading the buffers.");
  }

  /** Say why there is no run, or, with `isRun`, why there are no losses. */
  say(text, isRun = false) {
    this.tiles.hidden = this.choice.hidden = !isRun;
    this.loss.hidden = text !== "";
    if (!isRun) setBar(this.track, null);
    say(this.words, text);
  }

  /** Return what the row of a parameter has, and fill it from now on. */
  cells(name, tensor) {
    const row = { link: h("a", {}, name), version: h("td", { class: "number" }), updated: h("td") };
    this.rows.set(name, row);
    return [row.link, tensor, row.version, row.updated];
  }

  async read() {
    const infos = await this.api.all("buffers", { signal: this.signal });
    this.runs = runsOf(infos, this.graph.parameters);
    await this.draw();
  }

  async draw() {
    const last = this.runs.reduce((last, run) => (last === null || run.updated > last.updated ? run : last), null);
    const run = this.runs.find(({ prefix }) => prefix === this.chosen) ?? last;
    this.drawParameters(run);
    if (run === null) return this.say(this.why());
    this.chosen = run.prefix;
    const names = this.runs.map(({ prefix }) => prefix);
    if (String(names) !== String(Array.from(this.choice.options, ({ value }) => value)))
      put(this.choice, names.map((value) => h("option", { value }, value.slice(0, -1) || "no prefix")));
    this.choice.value = run.prefix;
    if (!this.seen.has(run.life)) this.seen.set(run.life, { before: 0, losses: [] });
    const seen = this.seen.get(run.life);
    await this.look(run, seen);
    if (this.chosen === run.prefix) this.drawRun(run, seen);
  }

  why() {
    if (!this.rows.size) return "The graph has no parameters.";
    return `No buffers have its parameters yet: set=parameters:${this.graph.name}.p.* writes them.`;
  }

  drawParameters(run) {
    [...this.rows.values()].forEach(({ link, version, updated }, place) => {
      const info = run?.parameters[place];
      mark(link, "href", info ? address(info.name) : null);
      say(version, info ? String(info.version) : "");
      say(updated, info ? this.ago(info.updated_at) : "");
    });
  }

  ago(at) {
    return words.distance(Math.min(at, this.api.now()), this.api.now());
  }

  /** Read the number of steps before the run, and the mean losses of its closed epochs, if they have changed. */
  async look({ first, loss }, seen) {
    const get = (name, end) => this.api.get(path(name, end), { signal: this.signal });
    if (first && seen.version !== first.version) {
      seen.before = Number((await get(first.name, "/value?encoding=list")).value.data);
      seen.version = first.version;
    }
    if (!loss || seen.epoch === loss.epoch) return;
    const { epochs } = await get(loss.name, "/statistics");
    const mean = (each) => (each.mean === null || each.weight === 0 ? null : each.mean / each.weight);
    const fresh = epochs.map((each) => ({ epoch: each.epoch, loss: mean(each) }));
    const known = new Map([...seen.losses, ...fresh].map((each) => [each.epoch, each]));
    seen.losses = [...known.values()].slice(-MAX_EPOCHS);
    seen.epoch = loss.epoch;
  }

  drawRun({ prefix, steps, behind, loss }, { before, losses }) {
    const last = losses.at(-1)?.loss;
    const texts = [
      (steps + before).toLocaleString("en"),
      behind ? String(behind.epoch) : "–",
      behind ? words.count(behind) : "–",
      behind?.missing ? words.missing(behind.missing) || "nobody" : "–",
      last === undefined ? "–" : last === null ? "none" : words.general(last, 4),
    ];
    texts.forEach((text, place) => say(this.values[place], text));
    const late = behind !== null && isLate(behind, this.api.now());
    this.values[TILES.indexOf("missing")].classList.toggle("late", late);
    setBar(this.track, behind && progress(behind), late);
    const none = loss ? "No epoch has closed yet." : `No losses: there is no buffer ${prefix}loss.`;
    this.say(losses.length ? "" : none, true);
    this.chart.set(losses);
  }
}

/**
 * Return the runs of these parameters. `steps` is how often a run has written all parameters since their first values.
 * `behind` is the gradients' buffer that lacks most, or null; `first`, if any, has the number of steps before the run.
 */
function runsOf(infos, parameters) {
  const known = new Map(infos.map((info) => [info.name, info]));
  const names = Object.keys(parameters);
  if (!names.length) return [];
  const end = `p.${names[0]}`;
  const prefixes = infos.flatMap(({ name }) => (name.endsWith(end) ? [name.slice(0, -end.length)] : []));
  return prefixes
    .filter((prefix) => prefix === "" || prefix.endsWith("."))
    .map((prefix) => [prefix, names.map((name) => known.get(`${prefix}p.${name}`))])
    .filter(([, infos]) => infos.every((info, place) => info && fits(info.shape, parameters[names[place]].shape)))
    .map(([prefix, infos]) => runOf(prefix, infos, names.map((name) => known.get(`${prefix}g.${name}`)), known))
    .sort((a, b) => byName(a.prefix, b.prefix));
}

const fits = (shape, wanted) => wanted?.every((length, place) => [null, shape[place]].includes(length)) ?? true;

function runOf(prefix, parameters, gradients, known) {
  const [loss, first] = [known.get(`${prefix}loss`), known.get(`${prefix}::first`)];
  const lacks = (a, b) => a.epoch - b.epoch || a.count - b.count;
  return {
    prefix,
    parameters,
    steps: Math.max(Math.min(...parameters.map(({ version }) => version)) - 1, 0),
    updated: Math.max(...parameters.map((info) => info.updated_at)),
    life: `${prefix}/${parameters[0].created_at}/${loss?.created_at}`, // another run may have the same name
    behind: gradients.filter(Boolean).sort(lacks)[0] ?? null,
    loss,
    first,
  };
}
