// A tensor's values as tables: a matrix is one table, a tensor of higher rank one for each matrix in it.

import { h, scroller, table } from "./dom.js";

/** Rows, columns and tables that are shown at most: more do not help a reader, and take seconds to lay out. */
const [MOST_ROWS, MOST_COLUMNS, MOST_TABLES] = [24, 12, 6];

/** Return the tables of a tensor {dtype, shape, data}, as the server answers it. */
export function tensorTables(name, { dtype, shape, data }) {
  const kind = shape.length ? `${dtype} [${shape.join(", ")}]` : `${dtype}, a scalar`;
  const all = [...matrices(data, shape, "")];
  const title = h("h3", {}, h("code", {}, name), " ", h("span", { class: "muted" }, kind));
  const shown = all.slice(0, MOST_TABLES).map(([place, rows]) => picture(name, place, rows));
  const none = all.length === 0 && h("p", { class: "muted" }, "No elements.");
  const rest = notShown([all.length, MOST_TABLES, "matrices"]);
  return h("div", { class: "tensor" }, title, h("div", { class: "matrices" }, shown), rest, none);
}

/** Yield each matrix of the tensor as [place, rows]: ["[0, 1]", rows]. */
function* matrices(data, shape, place) {
  if (shape.includes(0)) return;
  if (shape.length > 2) {
    const before = place ? `${place.slice(0, -1)}, ` : "[";
    for (const [index, inner] of data.entries()) yield* matrices(inner, shape.slice(1), `${before}${index}]`);
  } else yield [place, shape.length === 2 ? data : [shape.length === 1 ? data : [data]]];
}

function picture(name, place, rows) {
  const caption = place && h("figcaption", { class: "muted mono" }, place);
  const columns = [...rows[0].slice(0, MOST_COLUMNS).keys()];
  const shown = table("matrix", [h("td"), ...columns], rows.slice(0, MOST_ROWS).map(line));
  const rest = notShown([rows.length, MOST_ROWS, "rows"], [rows[0].length, MOST_COLUMNS, "columns"]);
  return h("figure", {}, caption, scroller(`Values of ${name}${place}`, "", shown), rest);
}

/** Return a note about what is left out, if anything is. A part is [its length, how much is shown, its name]. */
function notShown(...parts) {
  const left = parts.filter(([length, most]) => length > most);
  const texts = left.map(([length, most, noun]) => `${length - most} more ${noun}`);
  return left.length > 0 && h("p", { class: "muted" }, `${texts.join(" and ")} are not shown.`);
}

function line(row, index) {
  return h("tr", {}, h("th", { scope: "row" }, index), row.slice(0, MOST_COLUMNS).map(cell));
}

function cell(value) {
  const text = Object.is(value, -0) ? "-0" : String(value);
  return h("td", { class: typeof value === "string" ? "bad" : value === 0 ? "muted" : null }, text);
}
