// A table for many rows: only the rows in sight are in the document.

import { h, mark, put } from "./dom.js";

/** Rows above and below those in sight, so that a quick scroll shows no gaps. */
const MARGIN_ROWS = 6;

/**
 * A table whose rows are set as plain objects with an `id` and a `level`. Rows that can open have `open`.
 *
 * `columns` are {id, title, width, number, fill(cell, row)}; a cell of a column in `row.head.same` is not seen. The grid
 * calls `sorted(id)` for a click on a header, `chosen(row)` for Enter or a click on a row, `toggled(row, open)` for one
 * that opens, and `moved()` when other rows come into sight.
 */
export class Grid {
  constructor({ label, columns, sorted, chosen, toggled, moved }) {
    Object.assign(this, { columns, chosen, toggled, moved });
    this.rows = [];
    this.active = 0;
    this.shown = new Map();
    this.hidden = new Set();
    this.heads = columns.map((column) =>
      h(
        "div",
        { class: `cell c-${column.id}${column.number ? " number" : ""}`, role: "columnheader" },
        h("button", { type: "button", tabindex: "-1", onclick: () => sorted(column.id) }, column.title),
      ),
    );
    this.head = h("div", { class: "row head", role: "row", "aria-rowindex": "1" }, this.heads);
    this.body = h("div", { class: "rows", role: "rowgroup" });
    this.element = h(
      "div",
      { class: "grid", role: "treegrid", "aria-label": label, tabindex: "0" },
      h("div", { role: "rowgroup", class: "heads" }, this.head),
      this.body,
    );
    this.element.addEventListener("keydown", (event) => this.pressed(event));
    this.element.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.body.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Show these rows. The active row stays the same one, wherever it went. */
  set(rows, { sort, descending, hidden }) {
    const id = this.rows[this.active]?.id;
    this.rows = rows;
    const found = rows.findIndex((row) => row.id === id);
    this.active = found >= 0 ? found : Math.min(this.active, Math.max(rows.length - 1, 0));
    this.hidden = hidden;
    this.columns.forEach((column, place) => {
      this.heads[place].hidden = hidden.has(column.id);
      const direction = descending ? "descending" : "ascending";
      mark(this.heads[place], "aria-sort", column.id === sort ? direction : null);
    });
    const widths = this.columns.filter(({ id }) => !hidden.has(id)).map(({ width }) => width);
    this.element.style.setProperty("--columns", widths.join(" "));
    mark(this.element, "aria-rowcount", rows.length + 1);
    mark(this.element, "aria-colcount", this.columns.length);
    this.draw();
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 34;
  }

  /** Return the rows in sight. */
  visible() {
    const { first, last } = this.sight(0);
    return this.rows.slice(first, last);
  }

  sight(margin) {
    const height = this.height;
    const first = Math.floor(this.element.scrollTop / height) - margin;
    const last = Math.ceil((this.element.scrollTop + this.element.clientHeight) / height) + margin;
    return { first: Math.max(first, 0), last: Math.min(last, this.rows.length) };
  }

  scrolled() {
    this.draw();
    this.moved();
  }

  draw() {
    const height = this.height;
    this.body.style.height = `${this.rows.length * height}px`;
    const { first, last } = this.sight(MARGIN_ROWS);
    const wanted = new Map(this.rows.slice(first, last).map((row, place) => [row.id, first + place]));
    for (const [id, element] of this.shown) {
      if (!wanted.has(id)) {
        element.remove();
        this.shown.delete(id);
      }
    }
    for (const [id, place] of wanted) {
      if (!this.shown.has(id)) this.shown.set(id, this.body.appendChild(this.made()));
      this.fill(this.shown.get(id), this.rows[place], place, height);
    }
    mark(
      this.element,
      "aria-activedescendant",
      this.shown.has(this.rows[this.active]?.id) ? `row-${this.active}` : null,
    );
  }

  made() {
    const cells = this.columns.map((column) =>
      h("div", { class: `cell c-${column.id}${column.number ? " number" : ""}`, role: "gridcell" }),
    );
    return h("div", { class: "row", role: "row" }, cells);
  }

  fill(element, row, place, height) {
    element.id = `row-${place}`;
    element.style.transform = `translateY(${place * height}px)`;
    mark(element, "aria-rowindex", place + 2);
    mark(element, "aria-level", row.level);
    mark(element, "aria-posinset", row.position ?? place + 1);
    mark(element, "aria-setsize", row.siblings ?? this.rows.length);
    mark(element, "aria-expanded", row.open ?? null);
    mark(element, "aria-selected", place === this.active ? "true" : "false");
    this.columns.forEach((column, number) => {
      const cell = element.children[number];
      cell.hidden = this.hidden.has(column.id);
      if (!cell.hidden) column.fill(cell, row);
      cell.classList.toggle("told", row.head?.same.has(column.id) ?? false);
    });
  }

  clicked(event) {
    const element = event.target.closest(".row");
    const place = [...this.shown.values()].includes(element) ? Number(element.id.slice(4)) : -1;
    if (place < 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    this.active = place;
    this.act(this.rows[place]);
  }

  act(row) {
    if (row.open === undefined) this.chosen(row);
    else this.toggled(row, !row.open);
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.element || !this.rows.length) return;
    const row = this.rows[this.active];
    const page = Math.max(Math.floor(this.element.clientHeight / this.height) - 2, 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.go(this.active + moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.act(row);
    else if (event.key === "ArrowRight") this.right(row);
    else if (event.key === "ArrowLeft") this.left(row);
    else return;
    event.preventDefault();
  }

  right(row) {
    if (row.open === false) this.toggled(row, true);
    else if (row.open) this.go(this.active + 1);
  }

  left(row) {
    if (row.open) this.toggled(row, false);
    else {
      const above = this.rows.findLastIndex((each, place) => place < this.active && each.level < row.level);
      if (above >= 0) this.go(above);
    }
  }

  /** Go back to the row with this id, with the focus. */
  returnTo(id) {
    const place = this.rows.findIndex((row) => row.id === id);
    if (place < 0) return;
    this.element.focus();
    this.go(place);
  }

  /** Make the row at this place the active one, and scroll it into sight. */
  go(place) {
    this.active = Math.min(Math.max(place, 0), this.rows.length - 1);
    const [top, height, head] = [this.active * this.height, this.height, this.head.offsetHeight];
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + height > scrollTop + clientHeight - head)
      this.element.scrollTop = top + height + head - clientHeight;
    this.draw();
    this.moved();
  }
}

/** Return a cell's content, made once by `make` and kept as long as the cell lives. */
export function kept(cell, make) {
  if (!cell.parts) {
    cell.parts = make();
    put(cell, Object.values(cell.parts));
  }
  return cell.parts;
}
