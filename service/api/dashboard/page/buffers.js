// All buffers, as a table that follows them.

import { h, put, say } from "./dom.js";
import { known } from "./known.js";
import { lesson } from "./lesson.js";
import { follow, Listed } from "./listed.js";
import { isLate, isWaiting } from "./progress.js";
import { Staged } from "./staged.js";
import { BufferTable } from "./table.js";
import { isOwn } from "./training.js";
import * as words from "./words.js";

/** What a link may show alone, by its name in the address. */
const ONLY = { waiting: "waiting", late: "late", nonfinite: "with non-finite values" };

export async function show(main, { api, caller, signal, parameters }) {
  performance.mark("buffers asked");
  await follow(new Buffers(main, api, caller, signal, parameters.query), signal);
}

class Buffers {
  constructor(main, api, caller, signal, query) {
    Object.assign(this, { main, api, caller, signal });
    this.listed = new Listed(api, signal);
    this.only = query.get("only") in ONLY ? query.get("only") : null;
    this.alarms = new Set();
    this.table = new BufferTable({ label: "Buffers", api, signal, query, changed: () => this.changed() });
    const kind = (only) => (only === "nonfinite" ? "bad" : "late");
    const link = (only) => [only, h("a", { class: kind(only), href: `#/buffers?only=${only}`, hidden: true })];
    this.links = Object.fromEntries(Object.keys(ONLY).map(link));
    this.facts = h("span");
    this.staged = new Staged();
    const { field, order, asTree } = this.table;
    this.filter = h("button", { type: "button", class: "filter", onclick: () => this.choose(null) });
    const line = h("div", { class: "line" }, this.filter, field, order, asTree);
    const summary = h("p", { class: "summary muted" }, this.facts, Object.values(this.links));
    this.tools = h("div", { class: "tools" }, h("h1", {}, "Buffers"), summary, line);
  }

  async read() {
    const first = this.listed.infos === null;
    await this.listed.read();
    const { infos } = this.listed;
    known.keep(infos);
    this.draw();
    if (first && infos.length) performance.measure("buffers shown", "buffers asked");
    if (this.only === "nonfinite") await known.ask(infos, this);
    this.table.ask();
    await this.staged.read(this.api, this.signal);
  }

  tick() {
    this.table.grid.draw();
  }

  draw() {
    if (this.signal.aborted) return;
    const { infos } = this.listed;
    if (!infos.length) {
      if (!this.main.querySelector(".lesson")) put(this.main, lesson(this.caller, "No buffers yet"));
      return;
    }
    if (!this.tools.isConnected) put(this.main, this.tools, this.staged.element, ...this.table.elements);
    const shown = this.table.search.includes("::") ? infos : infos.filter(({ name }) => !isOwn(name));
    const now = this.api.now();
    const found = {
      waiting: shown.filter((info) => isWaiting(info, now)),
      late: shown.filter((info) => isLate(info, now)),
      nonfinite: known.ill(shown),
    };
    this.summarize(shown, found);
    this.filter.hidden = this.only === null;
    say(this.filter, this.only === null ? "" : `Only ${ONLY[this.only]} ✕`);
    this.table.set(this.only === null ? shown : found[this.only], `No buffer is ${ONLY[this.only] ?? "shown"} now.`);
  }

  summarize(infos, found) {
    const rate = this.listed.rate(infos);
    const bytes = words.size(infos.reduce((all, info) => all + info.bytes, 0));
    const texts = [words.many(infos.length, "buffer"), bytes, rate !== null && `${words.general(rate, 3)} adds/s`];
    say(this.facts, texts.filter(Boolean).join(" · "));
    for (const [only, some] of Object.entries(found)) {
      this.links[only].hidden = some.length === 0;
      say(this.links[only], `${some.length} ${ONLY[only]}`);
      this.alarm(some, only === "nonfinite" ? "has non-finite values" : `is ${only}`);
    }
  }

  /** Tell readers of a screen what is new, once. */
  alarm(infos, what) {
    const fresh = infos.map((info) => `${info.name} ${what}`).filter((text) => !this.alarms.has(text));
    fresh.forEach((text) => this.alarms.add(text));
    if (fresh.length)
      say(document.getElementById("news"), fresh.length > 3 ? `${fresh.length} buffers: ${what}` : fresh.join(". "));
  }

  choose(only) {
    this.only = only;
    this.changed();
    this.draw();
  }

  /** Keep what the reader chose in the address, so that it can be sent to others. */
  changed() {
    const { query } = this.table;
    if (this.only !== null) query.set("only", this.only);
    history.replaceState(null, "", `#/buffers${query.size ? `?${query}` : ""}`);
  }
}
