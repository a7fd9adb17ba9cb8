// All runs: how each goes, who is in, and who is waited for. The page begins here.

import { draw as drawCurve, POINTS, spark } from "./columns.js";
import { h, mark, put, say, table } from "./dom.js";
import { known } from "./known.js";
import { lesson } from "./lesson.js";
import { follow, Listed } from "./listed.js";
import { runsOf, stateOf, Steps, workersOf } from "./training.js";
import { byName } from "./tree.js";
import * as words from "./words.js";
import { chips, setChips } from "./workers.js";

/** Runs of each table that are shown at once, and chips of each run. */
const [MAX_SHOWN, MAX_CHIPS] = [100, 8];

/** Those in trouble are on top. */
const RANKS = { bad: 0, late: 1, on: 2, still: 2, over: 2 };

export async function show(main, { api, caller, signal }) {
  await followRuns(main, { api, signal, none: () => lesson(caller) });
}

/** Show the runs that `isShown(run)` chooses in `main`, or what `none()` returns, until the signal aborts. */
export async function followRuns(main, { api, signal, none, isShown = null }) {
  await follow(new Runs(main, api, signal, none, isShown), signal);
}

class Runs {
  constructor(main, api, signal, none, isShown) {
    Object.assign(this, { main, api, signal, none, isShown, runs: null });
    this.listed = new Listed(api, signal);
    this.steps = new Steps(api, signal);
    this.rows = new Map();
    this.news = new Map();
    this.summary = h("p", { class: "summary muted" });
    this.head = h("div", { class: "line top" }, h("h1", {}, "Runs"), this.summary);
    [this.active, this.idle] = [new Table(), new Table()];
    this.folded = h("summary");
    this.details = h("details", { class: "folded" }, this.folded, this.idle.element);
    this.quiet = h("p", { class: "muted none" }, "No run is active.");
  }

  async read() {
    await this.listed.read();
    const { infos } = this.listed;
    this.runs = runsOf(infos).filter(this.isShown ?? Boolean);
    known.keep(infos);
    this.tick();
    if (!this.runs.length) return;
    const shown = [...this.active.runs, ...(this.details.open ? this.idle.runs : [])];
    await this.steps.read(shown);
    await known.ask(shown.flatMap((run) => run.infos), this);
    this.tick();
  }

  tick() {
    if (this.signal.aborted) return;
    if (!this.runs.length) {
      if (this.details.isConnected || !this.main.children.length) put(this.main, this.none());
      return;
    }
    const head = this.isShown ? null : this.head;
    if (!this.details.isConnected) put(this.main, head, this.active.element, this.quiet, this.details);
    const now = this.api.now();
    const all = this.runs.map((run) => ({ run, state: stateOf(run, known.ill(run.infos).length, now) }));
    const rank = ({ state }) => RANKS[state.kind];
    const active = all.filter(({ state }) => state.isActive);
    active.sort((a, b) => rank(a) - rank(b) || byName(a.run.name, b.run.name));
    const idle = all.filter(({ state }) => !state.isActive);
    idle.sort((a, b) => b.run.moved - a.run.moved);
    this.active.fill(active, (each) => this.row(each, now));
    this.idle.fill(idle, (each) => this.row(each, now));
    [this.active.element.hidden, this.quiet.hidden] = [active.length === 0, active.length > 0];
    this.details.hidden = idle.length === 0;
    const ill = idle.filter(({ state }) => state.kind === "bad").length;
    say(this.folded, words.many(idle.length, "idle run") + (ill ? `, ${ill} with non-finite values` : ""));
    this.summarize(active.length);
    for (const { run, state } of active) this.announce(run, state);
  }

  row({ run, state }, now) {
    const row = this.rows.get(run.prefix) ?? this.rows.set(run.prefix, new Row(run)).get(run.prefix);
    row.fill(run, state, { now, steps: this.steps, rate: this.listed.rate(run.infos) });
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
    const before = this.news.get(run.prefix);
    this.news.set(run.prefix, kind);
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

/** Write how a run goes into a link, which leads to the buffers that it speaks of. */
export function tellState(link, { prefix }, { kind, text, only }) {
  mark(say(link, text), "class", `state ${kind}`);
  mark(link, "href", only && `#/buffers?only=${only}&search=${encodeURIComponent(prefix)}`);
}

/** The row of a run. Its elements stay, so that the focus and a selection do. */
class Row {
  constructor({ name }) {
    const cell = (kind) => [kind, h("td", { class: `number ${kind}` })];
    this.state = h("a");
    this.cells = Object.fromEntries(["step", "loss", "norm", "rate"].map(cell));
    [this.curve, this.norm, this.chips] = [spark(), h("span"), chips()];
    put(this.cells.norm, this.curve, this.norm);
    const link = h("a", { href: `#/runs/${encodeURIComponent(name)}`, class: "name" }, name);
    const head = h("th", { scope: "row" }, link, this.state);
    this.element = h("tr", {}, head, Object.values(this.cells), h("td", { class: "workers" }, this.chips));
  }

  fill(run, state, { now, steps, rate }) {
    mark(this.element, "data-state", state.kind);
    tellState(this.state, run, state);
    say(this.cells.step, (steps.of(run) ?? run.behind.step).toLocaleString("en"));
    const [loss] = run.losses.map((info) => known.curve([info], 1).at(-1)?.loss ?? null);
    say(this.cells.loss, typeof loss === "number" ? words.general(loss, 4) : "");
    const curve = known.curve(run.gradients, POINTS).map(({ norm }) => norm);
    say(this.norm, curve.length ? words.general(curve.at(-1), 4) : "");
    drawCurve(this.curve, curve);
    say(this.cells.rate, rate === null ? "" : words.general(rate, 3));
    setChips(this.chips, workersOf(run, now), MAX_CHIPS);
  }
}
