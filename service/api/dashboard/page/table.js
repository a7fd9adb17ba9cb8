// A table of buffers as a tree, which can be searched and sorted.

import { address, columnsOf, POINTS } from "./columns.js";
import { h, mark, say } from "./dom.js";
import { Grid } from "./grid.js";
import { known } from "./known.js";
import { isLoss } from "./progress.js";
import { rowsOf } from "./tree.js";

/** Buffers whose groups are open at first. More are easier to read as groups. */
const MAX_OPEN = 60;

/** Buffers of a group whose statistics are asked for: for more, their norm together is not shown. */
const MAX_MEMBERS = 100;

/** The row that the reader opened last, and the view: on the way back the table begins there. */
let left = { id: null, hash: "#/buffers" };

/** Return the address of the view that the reader came from to a buffer. */
export const cameFrom = () => left.hash;

/**
 * A table: `elements`, `field`, `order` and `asTree` are for the view to place. `changed()` is called when the reader
 * searches, sorts or arranges. With `prefix` all buffers are of one run, whose name is no row.
 */
export class BufferTable {
  constructor({ label, api, signal, query, prefix = "", changed = () => {} }) {
    Object.assign(this, { api, signal, prefix, changed });
    [this.infos, this.why, this.told] = [[], "", new Set()];
    this.search = query.get("search") ?? "";
    this.sort = query.get("sort") ?? "name";
    this.descending = query.has("descending");
    this.tree = query.get("list") === null;
    this.opened = new Map();
    this.columns = columnsOf({
      statistics: (row) => (membersOf(row).length > MAX_MEMBERS ? null : known.of(membersOf(row))),
      norms: (row) => row.info && !isLoss(row.info) ? known.curve([row.info], POINTS).map(({ norm }) => norm) : [],
      now: api.now,
    });
    if (!this.columns.some((column) => column.id === this.sort)) this.sort = "name";
    this.build(label);
    signal.addEventListener("abort", () => clearTimeout(this.timer));
  }

  build(label) {
    this.field = h("input", {
      type: "search",
      id: "search",
      placeholder: "Search names",
      value: this.search,
      "aria-label": "Search names",
      "aria-keyshortcuts": "/",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.searched(),
    });
    const options = this.columns.map((column) => h("option", { value: column.id }, column.title));
    this.order = h("select", { class: "phone", "aria-label": "Sort by" }, options);
    this.order.addEventListener("change", () => this.sorted(this.order.value));
    const pressed = { "aria-pressed": String(this.tree), title: "Group names by run and by their dots" };
    this.asTree = h("button", { type: "button", ...pressed, onclick: () => this.arrange() }, "Tree");
    this.grid = new Grid({
      label,
      columns: this.columns,
      sorted: (id) => this.sorted(id),
      chosen: (row) => {
        left = { id: row.id, hash: location.hash };
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
    this.elements = [this.grid.element, this.none];
    this.keys();
  }

  keys() {
    const pressed = (event) => {
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
    };
    document.addEventListener("keydown", pressed, { signal: this.signal });
  }

  /** Show these buffers without the columns in `told`. `none` says why there are no rows if nothing is searched for. */
  set(infos, none = "", told = new Set()) {
    const first = !this.infos.length;
    [this.infos, this.why, this.told] = [infos, none, told];
    this.draw();
    if (first && infos.length && left.id !== null && left.hash === location.hash) {
      this.grid.returnTo(left.id);
      left.id = null;
    }
  }

  draw() {
    const wanted = this.search.toLowerCase();
    const infos = wanted ? this.infos.filter((info) => info.name.toLowerCase().includes(wanted)) : this.infos;
    const column = this.columns.find((each) => each.id === this.sort);
    const rows = rowsOf(infos, {
      tree: this.tree,
      prefix: this.prefix,
      key: column.key,
      descending: this.descending,
      isOpen: (name) => this.opened.get(name) ?? (wanted !== "" || this.infos.length <= MAX_OPEN),
    });
    this.none.hidden = rows.length > 0;
    say(this.none, rows.length ? "" : wanted ? `No buffer has “${this.search}” in its name.` : this.why);
    this.grid.element.hidden = rows.length === 0;
    const unused = this.columns.filter(({ id, isUsed }) => this.told.has(id) || isUsed?.(this.infos) === false);
    const hidden = new Set(unused.map(({ id }) => id));
    this.grid.set(rows, { sort: this.sort, descending: this.descending, hidden });
    this.order.value = this.sort;
  }

  /** Ask for the statistics of the rows in sight. */
  async ask() {
    try {
      const members = this.grid.visible().map(membersOf);
      if (await known.ask(members.filter((some) => some.length <= MAX_MEMBERS).flat(), this)) this.draw();
    } catch (error) {
      if (!this.signal.aborted && !error.status) return; // the list says that the server is gone
    }
  }

  /** Ask for the rows that a scroll has brought, once it rests. */
  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), 150);
  }

  // ----- what the reader does -----

  searched() {
    this.search = this.field.value.trim();
    this.grid.element.scrollTop = 0;
    this.update();
  }

  sorted(id) {
    const isNumber = this.columns.find((each) => each.id === id).number === true;
    this.descending = id === this.sort ? !this.descending : id !== "name" && isNumber;
    this.sort = id;
    this.update();
  }

  arrange() {
    this.tree = !this.tree;
    mark(this.asTree, "aria-pressed", String(this.tree));
    this.update();
  }

  update() {
    this.changed();
    this.draw();
    this.soon();
  }

  /** Return what the reader chose, for the address. */
  get query() {
    const query = new URLSearchParams();
    if (this.search) query.set("search", this.search);
    if (this.sort !== "name") query.set("sort", this.sort);
    if (this.descending) query.set("descending", "");
    if (!this.tree) query.set("list", "");
    return query;
  }
}

const membersOf = (row) => (row.info ? [row.info] : row.members);
