// All buffers, as a table that follows them.

import { address, columnsOf, nonfinite } from "./columns.js";
import { failure, h, mark, put, say } from "./dom.js";
import { Grid } from "./grid.js";
import { Known } from "./known.js";
import { isLate } from "./progress.js";
import { repeat } from "./repeat.js";
import { lesson } from "./lesson.js";
import { Staged } from "./staged.js";
import { rowsOf } from "./tree.js";
import * as words from "./words.js";

/** Buffers whose groups are open at first. More are easier to read as groups. */
const MAX_OPEN = 60;

/** Seconds between two readings of the list, and of what is shown of the time. */
const [LIST_SECONDS, CLOCK_SECONDS] = [2, 1];

/** The row that the reader opened last: on the way back the table begins there. */
let left = null;

export async function show(main, { api, caller, signal, parameters }) {
  const view = new Buffers(main, api, caller, signal, parameters.query);
  performance.mark("buffers asked");
  await repeat(signal, LIST_SECONDS, () => view.read(), (error) => view.failed(error));
}

class Buffers {
  constructor(main, api, caller, signal, query) {
    Object.assign(this, { main, api, caller, signal });
    this.infos = null;
    this.adds = { version: new Map(), at: 0, rate: null };
    this.known = new Known(api, signal);
    this.search = query.get("search") ?? "";
    this.sort = query.get("sort") ?? "name";
    this.descending = query.has("descending");
    this.tree = query.get("list") === null;
    this.opened = new Map();
    this.alarms = new Set();
    this.columns = columnsOf({
      statistics: (row) => this.known.of(row),
      norms: (name) => this.known.norms(name),
      now: api.now,
    });
    if (!this.columns.some((column) => column.id === this.sort)) this.sort = "name";
    this.build();
  }

  build() {
    this.field = h("input", {
      type: "search",
      id: "search",
      placeholder: "Search names",
      value: this.search,
      "aria-label": "Search names",
      "aria-keyshortcuts": "/",
      autocomplete: "off",
      spellcheck: "false",
    });
    this.field.addEventListener("input", () => this.searched());
    this.order = h(
      "select",
      { class: "phone", "aria-label": "Sort by" },
      this.columns.map((column) => h("option", { value: column.id }, column.title)),
    );
    this.order.addEventListener("change", () => this.sorted(this.order.value));
    this.asTree = h(
      "button",
      { type: "button", "aria-pressed": String(this.tree), title: "Group names by their dots" },
      "Tree",
    );
    this.asTree.addEventListener("click", () => this.arrange());
    this.summary = h("p", { class: "summary muted" });
    this.grid = new Grid({
      label: "Buffers",
      columns: this.columns,
      sorted: (id) => this.sorted(id),
      chosen: (row) => {
        left = row.id;
        location.hash = address(row.name);
      },
      toggled: (row, open) => {
        this.opened.set(row.name, open);
        this.draw();
        this.ask();
      },
      moved: () => this.soon(),
    });
    this.none = h("p", { class: "none muted", hidden: true });
    this.staged = new Staged();
    this.tools = h(
      "div",
      { class: "tools" },
      h("h1", {}, "Buffers"),
      this.summary,
      h("div", { class: "line" }, this.field, this.order, this.asTree),
    );
    this.keys();
    const clock = setInterval(
      () => document.visibilityState === "visible" && this.infos && this.grid.draw(),
      CLOCK_SECONDS * 1000,
    );
    this.signal.addEventListener("abort", () => {
      clearInterval(clock);
      clearTimeout(this.timer);
    });
  }

  keys() {
    document.addEventListener(
      "keydown",
      (event) => {
        const typing = event.target.matches("input, textarea, select");
        if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
          event.preventDefault();
          this.field.focus();
          this.field.select();
        }
        if (event.key === "Escape" && event.target === this.field) {
          this.field.value = "";
          this.searched();
          this.grid.element.focus();
        }
        if (["ArrowDown", "Enter"].includes(event.key) && event.target === this.field) {
          event.preventDefault();
          this.grid.element.focus();
        }
      },
      { signal: this.signal },
    );
  }

  // ----- what the server says -----

  async read() {
    const infos = await this.api.all("buffers", { signal: this.signal });
    const first = this.infos === null;
    this.infos = infos;
    this.count();
    this.known.keep(new Set(infos.map((info) => info.name)));
    this.draw();
    if (first && infos.length) performance.measure("buffers shown", "buffers asked");
    if (first && left !== null) this.grid.returnTo(left);
    left = null;
    this.ask();
    await this.staged.read(this.api, this.signal);
  }

  /** Count the adds since the last reading, as `gradserve-client watch` counts them. */
  count() {
    const [at, before] = [performance.now(), this.adds.version];
    const version = new Map(this.infos.map((info) => [info.name, info]));
    let adds = 0;
    for (const info of this.infos) {
      const then = before.get(info.name);
      if (!then || then.created_at !== info.created_at) continue;
      const epochs = info.quorum === null ? info.epoch - then.epoch : 0; // a take or a zero is no add
      adds += Math.max(info.version - then.version - epochs, 0);
    }
    this.adds = { version, at, rate: before.size ? (1000 * adds) / (at - this.adds.at) : null };
  }

  async ask() {
    try {
      if (await this.known.ask(this.grid.visible())) this.draw();
    } catch (error) {
      if (!this.signal.aborted && !error.status) return; // the list says that the server is gone
    }
  }

  /** Ask for the rows that a scroll has brought, once it rests. */
  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), 150);
  }

  failed(error) {
    if (error.status && error.status !== 401 && this.infos === null) put(this.main, failure(error));
  }

  // ----- what the reader sees -----

  draw() {
    if (this.signal.aborted) return;
    if (!this.infos.length) {
      if (!this.main.querySelector(".lesson")) put(this.main, lesson(this.caller));
      return;
    }
    if (!this.grid.element.isConnected)
      put(this.main, this.tools, this.staged.element, this.grid.element, this.none);
    const wanted = this.search.toLowerCase();
    const infos = wanted ? this.infos.filter((info) => info.name.toLowerCase().includes(wanted)) : this.infos;
    const column = this.columns.find((each) => each.id === this.sort);
    const rows = rowsOf(infos, {
      tree: this.tree,
      key: column.key,
      descending: this.descending,
      isOpen: (name) => this.opened.get(name) ?? (wanted !== "" || this.infos.length <= MAX_OPEN),
    });
    this.none.hidden = rows.length > 0;
    say(this.none, rows.length ? "" : `No buffer has “${this.search}” in its name.`);
    this.grid.element.hidden = rows.length === 0;
    this.grid.set(rows, { sort: this.sort, descending: this.descending, hidden: this.unused() });
    this.order.value = this.sort;
    this.summarize(infos);
  }

  /** Return the columns that no buffer has a value for. */
  unused() {
    const names = [];
    if (this.infos.every((info) => info.deadline_seconds === null)) names.push("deadline");
    if (this.infos.every((info) => info.missing === null)) names.push("missing");
    return new Set(names);
  }

  summarize(infos) {
    const now = this.api.now();
    const late = infos.filter((info) => isLate(info, now));
    const ill = infos.filter((info) => nonfinite(this.known.statistics.get(info.name)) > 0);
    const rate = this.adds.rate === null ? [] : [`${words.general(this.adds.rate, 3)} adds/s`];
    const bytes = words.size(infos.reduce((all, info) => all + info.bytes, 0));
    const parts = [words.many(infos.length, "buffer"), bytes, ...rate].map((text) => h("span", {}, text));
    if (late.length) parts.push(h("span", { class: "late" }, `${late.length} late`));
    if (ill.length) parts.push(h("span", { class: "bad" }, `${ill.length} with non-finite values`));
    put(this.summary, parts);
    this.alarm(late, "is late");
    this.alarm(ill, "has non-finite values");
  }

  /** Tell readers of a screen what is new, once. */
  alarm(infos, what) {
    const fresh = infos.map((info) => `${info.name} ${what}`).filter((text) => !this.alarms.has(text));
    fresh.forEach((text) => this.alarms.add(text));
    if (fresh.length)
      say(document.getElementById("news"), fresh.length > 3 ? `${fresh.length} buffers: ${what}` : fresh.join(". "));
  }

  // ----- what the reader does -----

  searched() {
    this.search = this.field.value.trim();
    this.grid.element.scrollTop = 0;
    this.changed();
  }

  sorted(id) {
    this.descending =
      id === this.sort
        ? !this.descending
        : id !== "name" && this.columns.find((each) => each.id === id).number === true;
    this.sort = id;
    this.changed();
  }

  arrange() {
    this.tree = !this.tree;
    mark(this.asTree, "aria-pressed", String(this.tree));
    this.changed();
  }

  /** Show the choice, and keep it in the address, so that it can be sent to others. */
  changed() {
    const query = new URLSearchParams();
    if (this.search) query.set("search", this.search);
    if (this.sort !== "name") query.set("sort", this.sort);
    if (this.descending) query.set("descending", "");
    if (!this.tree) query.set("list", "");
    history.replaceState(null, "", `#/buffers${query.size ? `?${query}` : ""}`);
    this.draw();
    this.soon();
  }
}
