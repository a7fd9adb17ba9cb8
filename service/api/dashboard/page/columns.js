// The columns of the table of buffers.

import { h, mark, say, svg } from "./dom.js";
import { kept } from "./grid.js";
import { bad } from "./known.js";
import { bar, isLate, isWaiting, progress, setBar } from "./progress.js";
import { workersOf } from "./training.js";
import * as words from "./words.js";

const SPARK = { width: 52, height: 16 };

/** Numbers that a small curve shows. */
export const POINTS = 200;

/** The least correlation of ranks with places that is a trend. */
const TREND = 0.3;

/**
 * Return the columns. `statistics(row)` are the known statistics of a row, `norms(row)` those of its closed steps, and
 * `now()` is the server's time. `width` is for the grid; a column that is not `isUsed(infos)` is not shown.
 */
export function columnsOf({ statistics, norms, now }) {
  const of = (row) => row.info ?? row.total;
  const late = (row) => membersOf(row).some((info) => isLate(info, now()) || isWaiting(info, now()));
  const text = (write) => (cell, row) => {
    say(cell, write(of(row), row) ?? "");
    mark(cell, "title", cell.textContent);
  };
  const amber = (cell, on) => cell.classList.toggle("late", on);
  const plain = (id, width, write, more = {}) =>
    ({ id, title: id, width, key: (row) => of(row)[id], fill: text(write), ...more });
  const size = (row) => row.info?.shape.reduce((all, each) => all * each, 1) ?? null;
  const shape = (info, row) => (row.info ? words.shape(info.shape) : words.many(row.members.length, "buffer"));
  const weight = (info) => (info.weight === null ? "" : words.weight(info));
  const step = (info) => (info.steps ? [...new Set(info.steps)].join("–") : String(info.step));
  return [
    { id: "name", title: "name", width: "minmax(11rem, 1fr)", key: (row) => row.name, fill: name },
    plain("shape", "7rem", shape, { key: size }),
    plain("dtype", "4.8rem", ({ dtype }) => dtype),
    {
      id: "count",
      title: "count",
      width: "6.5rem",
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
      width: "minmax(8rem, 2fr)",
      isUsed: (infos) => infos.some((info) => info.missing !== null),
      key: (row) => of(row).missing?.length ?? null,
      fill: (cell, row) => {
        const out = workersOf(row.info ?? row.total.behind, now()).filter(({ since }) => since !== null);
        const names = out.map(({ name }) => name);
        const since = Math.max(...out.map((each) => each.since));
        say(cell, out.length ? `${words.missing(names)} for ${words.span(since)}` : "");
        mark(cell, "title", names.length ? `${names.length} missing: ${names.slice(0, 100).join(", ")}` : null);
        amber(cell, out.some(({ kind }) => kind.startsWith("out slow")));
      },
    },
    plain("weight", "5.2rem", weight, { number: true }),
    plain("step", "4rem", step, { number: true, key: (row) => row.info?.step ?? row.total.steps[1] }),
    {
      id: "deadline",
      title: "deadline",
      width: "5.4rem",
      isUsed: (infos) => infos.some((info) => info.deadline_seconds !== null),
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
      width: "minmax(6rem, 0.3fr)",
      key: (row) => -of(row).updated_at,
      fill: (cell, row) => {
        say(cell, words.distance(Math.min(of(row).updated_at, now()), now()));
        mark(cell, "title", words.time(of(row).updated_at));
      },
    },
    plain("size", "4.8rem", ({ bytes }) => words.size(bytes), { number: true, key: (row) => of(row).bytes }),
    {
      id: "norm",
      title: "norm",
      width: "7.4rem",
      number: true,
      key: (row) => statistics(row)?.norm ?? null,
      fill: (cell, row) => {
        const parts = kept(cell, () => ({ line: spark(), text: h("span") }));
        const known = statistics(row);
        const norm = known && (bad(known) ?? known.norm);
        say(parts.text, norm === null ? "" : words.general(norm, 4));
        parts.text.classList.toggle("bad", norm !== null && !Number.isFinite(norm));
        draw(parts.line, norms(row));
      },
    },
    {
      id: "nonfinite",
      title: "non-finite",
      width: "5rem",
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
const nonfinite = (known) => known && (known.nan + known.infinite) / Math.max(known.size, 1);

const membersOf = (row) => row.members ?? [row.info];

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

/** Return a small curve, which `draw` fills. */
export function spark() {
  const { width, height } = SPARK;
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    svg("polyline", { points: "" }),
  );
}

/** Draw the numbers that are finite. */
export function draw(element, numbers) {
  const { width, height } = SPARK;
  const values = numbers.filter(Number.isFinite);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (place) => 1 + ((width - 2) * place) / Math.max(values.length - 1, 1);
  const y = (value) => height - 2 - ((height - 4) * (value - low)) / (high - low || 1);
  const points =
    values.length < 2 ? "" : values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  mark(element.firstChild, "points", points);
}

/** Return in a word how numbers go, by their ranks: falling, rising or flat; null for fewer than three. */
export function trend(numbers) {
  const size = numbers.length;
  if (size < 3 || !numbers.every(Number.isFinite)) return null;
  const ranks = new Map(numbers.toSorted((a, b) => a - b).map((number, place) => [number, place]));
  const sum = (each) => numbers.reduce((all, number, place) => all + each(ranks.get(number), place), 0);
  const mean = sum((rank) => rank) / size;
  const along = sum((rank, place) => (place - (size - 1) / 2) * (rank - mean));
  const correlation = along / Math.sqrt((sum((rank) => (rank - mean) ** 2) * (size ** 3 - size)) / 12) || 0;
  return Math.abs(correlation) < TREND ? "flat" : correlation < 0 ? "falling" : "rising";
}
