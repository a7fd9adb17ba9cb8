// All runs: how each goes, who is in, and who is waited for. The page begins here.

import { draw as drawCurve, POINTS, spark, trend } from "./columns.js";
import { h, mark, put, say, table } from "./dom.js";
import { known } from "./known.js";
import { lesson } from "./lesson.js";
import { follow, Listed } from "./listed.js";
import { stateOf, workersOf } from "./training.js";
import { byName } from "./tree.js";
import * as words from "./words.js";
import { chips, setChips } from "./workers.js";

/** Runs of each table that are shown at once, chips of each run, and gradients whose norms are asked for. */
const [MAX_SHOWN, MAX_CHIPS, MAX_GRADIENTS] = [100, 8, 200];

/** Those in trouble are on top. */
const RANKS = { bad: 0, late: 1, on: 2, still: 2, over: 2 };

export async function show(main, { api, caller, signal }) {
  await followRuns(main, { api, signal, none: () => lesson(caller, "No runs yet") });
}

/** Show the runs that `isShown(run)` chooses in `main`, or what `none()` returns, until the signal aborts. */
export async function followRuns(main, { api, signal, none, isShown = null }) {
  await follow(new Runs(main, api, signal, none, isShown), signal);
}

class Runs {
  constructor(main, api, signal, none, isShown) {
    Object.assign(this, { main, api, signal, none, isShown, runs: null });
    this.listed = new Listed(api, signal);
    this.rows = new Map();
    this.news = new Map();
    this.summary = h("p", { class: "summary muted" });
    this.head = h("div", { class: "line top" }, h("h1", {}, "Runs"), this.summary);
    [this.active, this.idle] = [new Table(), new Table()];
    this.folded = h("summary");
    this.details = h("details", { class: "folded" }, this.folded, this.idle.element);
  }

  async read() {
    this.runs = (await this.listed.readRuns()).filter(this.isShown ?? Boolean);
    known.keep(this.listed.infos);
    this.tick();
    const shown = [...this.active.runs, ...(this.details.open ? this.idle.runs : [])];
    const lead = shown.flatMap((run) => [run.losses[0], run.lead, run.begun].filter(Boolean));
    await known.ask(lead, this);
    if (!this.signal.aborted) this.tick();
    for (const { losses } of shown) if (losses.length) await known.readSteps(losses[0], this, POINTS);
    const bare = shown.toSorted((a, b) => Math.sign(a.losses.length) - Math.sign(b.losses.length));
    await known.ask(bare.flatMap((run) => run.gradients).slice(0, MAX_GRADIENTS), this);
    this.tick();
  }

  tick() {
    if (this.signal.aborted) return;
    if (!this.runs.length) {
      if (this.details.isConnected || !this.main.children.length) put(this.main, this.none());
      return;
    }
    const head = this.isShown ? null : this.head;
    if (!this.details.isConnected) put(this.main, head, this.active.element, this.details);
    const now = this.api.now();
    const all = this.runs.map((run) => ({ run, state: stateOf(run, known.illness(run), now) }));
    const rank = ({ state }) => RANKS[state.kind];
    const active = all.filter(({ state }) => state.isActive);
    active.sort((a, b) => rank(a) - rank(b) || byName(a.run.name, b.run.name));
    const idle = all.filter(({ state }) => !state.isActive);
    idle.sort((a, b) => b.run.updated_at - a.run.updated_at);
    this.active.fill(active, (each) => this.row(each, now));
    this.idle.fill(idle, (each) => this.row(each, now));
    if (!active.length && !this.active.element.hidden) this.details.open = true; // they are all there is
    [this.active.element.hidden, this.details.hidden] = [active.length === 0, idle.length === 0];
    const ill = idle.filter(({ state }) => state.kind === "bad").length;
    const finished = idle.filter(({ run }) => run.state === "finished").length;
    const texts = [[finished, "finished run"], [idle.length - finished, "idle run"]].filter(([number]) => number);
    say(this.folded, [...texts.map((each) => words.many(...each)), ...(ill ? [`${ill} with NaN`] : [])].join(", "));
    this.summarize(active.length);
    for (const { run, state } of active) this.announce(run, state);
  }

  row({ run, state }, now) {
    const row = this.rows.get(run.life) ?? this.rows.set(run.life, new Row(run)).get(run.life);
    row.fill(run, state, { now, rate: this.listed.rate(run.infos) });
    return row.element;
  }

  summarize(active) {
    const infos = this.runs.flatMap((run) => run.infos);
    const rate = this.listed.rate(infos);
    const bytes = words.size(infos.reduce((sum, info) => sum + info.bytes, 0));
    const texts = [words.many(active, "active run"), words.many(infos.length, "buffer"), bytes];
    say(this.summary, [...texts, ...(rate === null ? [] : [`${words.general(rate, 3)} adds/s`])].join(" · "));
  }

  /** Tell readers of a screen what is new, once. */
  announce(run, { kind, text }) {
    const before = this.news.get(run.life);
    this.news.set(run.life, kind);
    if (["late", "bad"].includes(kind) && before !== kind) say(document.getElementById("news"), `${run.name}: ${text}`);
  }
}

/** A table of runs, whose rows `fill` puts there. */
class Table {
  constructor() {
    const number = (title) => h("th", { scope: "col", class: "number" }, title);
    const heads = ["run", number("step"), number("loss"), number("norm"), number("adds/s"), "workers"];
    const element = table("plain runs", heads, []);
    [this.runs, this.most, this.body] = [[], MAX_SHOWN, element.tBodies[0]];
    this.more = h("button", { type: "button", hidden: true, onclick: () => (this.most += MAX_SHOWN) });
    this.element = h("section", { class: "panel" }, element, this.more);
  }

  fill(all, rowOf) {
    this.runs = all.slice(0, this.most).map(({ run }) => run);
    const rows = all.slice(0, this.most).map(rowOf);
    const isSame = rows.length === this.body.children.length && rows.every((row, at) => row === this.body.children[at]);
    if (!isSame) put(this.body, rows); // else a link keeps the focus
    this.more.hidden = rows.length === all.length;
    say(this.more, `Show ${Math.min(MAX_SHOWN, all.length - rows.length)} more`);
  }
}

/** Write how a run goes. */
export function tellState(element, { kind, text }) {
  mark(say(element, text), "class", `state ${kind}`);
}

/** The row of a run. Its elements stay, so that the focus and a selection do. */
class Row {
  constructor({ name }) {
    const cell = (kind) => [kind, h("td", { class: `number ${kind}` })];
    this.state = h("span");
    this.cells = Object.fromEntries(["step", "loss", "norm", "rate"].map(cell));
    const curve = (kind) => [kind, { line: spark(), text: h("span"), arrow: h("span") }];
    this.curves = Object.fromEntries(["loss", "norm"].map(curve));
    for (const [kind, parts] of Object.entries(this.curves)) put(this.cells[kind], Object.values(parts));
    this.chips = chips();
    const link = h("a", { href: `#/runs/${encodeURIComponent(name)}`, class: "name" }, name);
    const head = h("th", { scope: "row" }, link, this.state);
    this.element = h("tr", {}, head, Object.values(this.cells), h("td", { class: "workers" }, this.chips));
  }

  fill(run, state, { now, rate }) {
    mark(this.element, "data-state", state.kind);
    tellState(this.state, state);
    say(this.cells.step, (run.step + known.begun(run)).toLocaleString("en"));
    const losses = known.curve(run.losses.slice(0, 1), POINTS).map(({ loss }) => loss);
    this.write("loss", losses, losses, trend(losses));
    const norms = known.curve(run.gradients, POINTS).map(({ norm }) => norm);
    this.write("norm", norms, run.losses.length ? [] : norms);
    say(this.cells.rate, rate === null ? "" : words.general(rate, 3));
    setChips(this.chips, workersOf(run, now), MAX_CHIPS);
  }

  /** Write the last of these numbers, and a curve, with a word for how it goes. */
  write(kind, numbers, curve, word = null) {
    const { line, text, arrow } = this.curves[kind];
    const last = numbers.at(-1) ?? null;
    say(text, last === null ? "" : words.general(last, 4));
    mark(text, "class", last !== null && !Number.isFinite(last) && "bad");
    drawCurve(line, curve);
    mark(say(arrow, word ?? ""), "class", word && `trend ${word}`);
  }
}
