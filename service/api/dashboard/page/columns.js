// The columns of the table of buffers.

import { h, mark, say, svg } from "./dom.js";
import { kept } from "./grid.js";
import { bar, isLate, progress, setBar } from "./progress.js";
import * as words from "./words.js";

const SPARK = { width: 52, height: 16 };

/** Return the columns. `statistics(row)` are the known statistics of a row, `now()` the server's time. */
export function columnsOf({ statistics, norms, now }) {
  const of = (row) => row.info ?? row.total;
  const late = (row) => isLate(of(row), now());
  const text = (write) => (cell, row) => say(cell, write(of(row), row) ?? "");
  const amber = (cell, on) => cell.classList.toggle("late", on);
  return [
    { id: "name", title: "name", key: (row) => row.name, fill: name },
    {
      id: "shape",
      title: "shape",
      key: (row) => row.info?.shape.reduce((all, each) => all * each, 1) ?? null,
      fill: (cell, row) => {
        say(cell, row.info ? words.shape(row.info.shape) : words.many(row.members.length, "buffer"));
        mark(cell, "title", row.info ? cell.textContent : null);
      },
    },
    { id: "dtype", title: "dtype", key: (row) => of(row).dtype, fill: text((info) => info.dtype) },
    {
      id: "count",
      title: "count",
      key: (row) => progress(of(row)) ?? of(row).count,
      fill: (cell, row) => {
        const parts = kept(cell, () => ({ text: h("span"), bar: bar() }));
        say(parts.text, words.count(of(row)));
        setBar(parts.bar, progress(of(row)), late(row));
      },
    },
    {
      id: "missing",
      title: "missing",
      key: (row) => of(row).missing?.length ?? null,
      fill: (cell, row) => {
        const names = of(row).missing ?? [];
        say(cell, words.missing(names));
        mark(cell, "title", names.length ? `${names.length} missing: ${names.slice(0, 100).join(", ")}` : null);
        amber(cell, late(row));
      },
    },
    { id: "weight", title: "weight", number: true, key: (row) => of(row).weight, fill: text(words.weight) },
    {
      id: "epoch",
      title: "epoch",
      number: true,
      key: (row) => row.info?.epoch ?? row.total.epochs[1],
      fill: text((info) => (info.epochs ? [...new Set(info.epochs)].join("–") : String(info.epoch))),
    },
    {
      id: "deadline",
      title: "deadline",
      key: (row) => of(row).deadline_at,
      fill: (cell, row) => {
        const at = of(row).deadline_at;
        say(cell, at === null ? "" : words.distance(at, now()));
        mark(cell, "title", at === null ? null : words.time(at));
        amber(cell, late(row));
      },
    },
    {
      id: "updated",
      title: "updated",
      key: (row) => -of(row).updated_at,
      fill: (cell, row) => {
        say(cell, words.distance(Math.min(of(row).updated_at, now()), now()));
        mark(cell, "title", words.time(of(row).updated_at));
      },
    },
    {
      id: "size",
      title: "size",
      number: true,
      key: (row) => of(row).bytes,
      fill: text((info) => words.size(info.bytes)),
    },
    {
      id: "norm",
      title: "norm",
      number: true,
      key: (row) => statistics(row)?.norm ?? null,
      fill: (cell, row) => {
        const parts = kept(cell, () => ({ line: spark(), text: h("span") }));
        const norm = statistics(row)?.norm ?? null;
        say(parts.text, norm === null ? "" : words.general(norm, 4));
        draw(parts.line, row.info ? norms(row.name) : []);
      },
    },
    {
      id: "nonfinite",
      title: "non-finite",
      number: true,
      key: (row) => nonfinite(statistics(row)),
      fill: (cell, row) => {
        const known = statistics(row);
        say(cell, known ? words.share(known.nan + known.infinite, known.size) : "");
        cell.classList.toggle("bad", (nonfinite(known) ?? 0) > 0);
      },
    },
  ];
}

/** Return the share of elements that are not finite, or null. */
export function nonfinite(known) {
  return known ? (known.nan + known.infinite) / Math.max(known.size, 1) : null;
}

function name(cell, row) {
  const parts = kept(cell, () => ({
    mark: h("span", { class: "twist", "aria-hidden": "true" }),
    link: h("a", { tabindex: "-1" }),
  }));
  cell.style.setProperty("--level", row.level - 1);
  cell.classList.toggle("group", row.open !== undefined);
  say(parts.mark, row.open === undefined ? "" : row.open ? "▾" : "▸");
  say(parts.link, row.label || ".");
  mark(parts.link, "href", row.open === undefined ? address(row.name) : null);
  mark(cell, "title", row.name);
}

export function address(name) {
  return `#/buffers/${encodeURIComponent(name)}`;
}

function spark() {
  const { width, height } = SPARK;
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    svg("polyline", { points: "" }),
  );
}

function draw(element, values) {
  const { width, height } = SPARK;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (place) => 1 + ((width - 2) * place) / Math.max(values.length - 1, 1);
  const y = (value) => height - 2 - ((height - 4) * (value - low)) / (high - low || 1);
  const points =
    values.length < 2 ? "" : values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  mark(element.firstChild, "points", points);
}
