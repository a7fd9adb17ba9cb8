// A tensor's values as tables: a matrix is one table, a tensor of higher rank one for each matrix in it.

import { h, scroller, table } from "./dom.js";

/** Rows, columns and tables that are shown at most: more do not help a reader, and take seconds to lay out. */
const MOST_ROWS = 24;
const MOST_COLUMNS = 12;
const MOST_TABLES = 6;

/** Return the tables of a tensor {dtype, shape, data}, as the server answers it. */
export function tensorTables(name, { dtype, shape, data }) {
  const kind = shape.length ? `${dtype} [${shape.join(", ")}]` : `${dtype}, a scalar`;
  const all = [...matrices(data, shape, "")];
  const hidden = all.length - MOST_TABLES;
  return h(
    "div",
    { class: "tensor" },
    h("h3", {}, h("code", {}, name), " ", h("span", { class: "muted" }, kind)),
    h("div", { class: "matrices" }, all.slice(0, MOST_TABLES).map(([place, rows]) => picture(name, place, rows))),
    hidden > 0 && h("p", { class: "muted" }, `${hidden} more matrices are not shown.`),
    all.length === 0 && h("p", { class: "muted" }, "No elements."),
  );
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
  const [height, width] = [rows.length, rows[0].length];
  const missing = [
    height > MOST_ROWS && `${height - MOST_ROWS} more rows`,
    width > MOST_COLUMNS && `${width - MOST_COLUMNS} more columns`,
  ].filter(Boolean);
  const columns = [...rows[0].slice(0, MOST_COLUMNS).keys()];
  const shown = rows.slice(0, MOST_ROWS).map(line);
  return h(
    "figure",
    {},
    place && h("figcaption", { class: "muted mono" }, place),
    scroller(`Values of ${name}${place}`, "", table("matrix", [h("td"), ...columns], shown)),
    missing.length > 0 && h("p", { class: "muted" }, `${missing.join(" and ")} are not shown.`),
  );
}

function line(row, index) {
  return h("tr", {}, h("th", { scope: "row" }, index), row.slice(0, MOST_COLUMNS).map(cell));
}

function cell(value) {
  return h("td", { class: typeof value === "string" ? "bad" : value === 0 ? "muted" : null }, numeral(value));
}

function numeral(value) {
  return Object.is(value, -0) ? "-0" : String(value);
}
