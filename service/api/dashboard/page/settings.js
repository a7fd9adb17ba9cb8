// The settings and limits in force, as a table that can be searched. It is folded: the charts are read more often.

import { find, h, say, scroller, table } from "./dom.js";
import { many } from "./words.js";

const UNITS = { TiB: 2 ** 40, TB: 1e12, GiB: 2 ** 30, GB: 1e9, MiB: 2 ** 20, MB: 1e6, KiB: 1024, kB: 1000 };

/** Return the panel. With words to look for, as in #/service?settings=seconds, it is open. */
export function settingsPanel({ settings, limits }, words) {
  const rows = [
    ...Object.entries(settings).map(([name, each]) => row(name, each)),
    ...Object.entries(limits).map(([name, each]) => row(name, each, "a limit without a setting")),
  ];
  const count = h("span", { class: "muted", role: "status" });
  const hints = { placeholder: "Search", "aria-label": "Search settings and limits" };
  const search = h("input", { type: "search", value: words, oninput: look, ...hints });
  function look() {
    say(count, many(find(rows, search.value), "line"));
  }
  look();
  const label = "Settings and limits in force";
  return h(
    "details",
    { class: "panel wide", open: words !== null },
    h("summary", {}, h("h2", {}, label)),
    h("p", { class: "line" }, search, count),
    scroller(label, "", table("plain settings", ["name", "value", "meaning"], rows.map((each) => each.element))),
  );
}

function row(name, { value, meaning }, note) {
  const words = `${name} ${value} ${meaning}`.toLowerCase();
  const written = value === null ? h("span", { class: "muted" }, "not set") : shown(name, value, meaning);
  const about = h("td", {}, meaning, note && h("span", { class: "muted" }, ` (${note})`));
  return { words, element: h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, written), about) };
}

/** Bytes and seconds have their unit, and long numbers commas between their thousands. A port is no amount. */
function shown(name, value, meaning) {
  if (typeof value !== "number" || name.endsWith("_PORT")) return h("code", {}, String(value));
  const exact = value.toLocaleString("en");
  const [what] = meaning.split(" ", 1);
  const text = { Bytes: bytes(value), Seconds: `${exact} s` }[what] ?? exact;
  return h("code", { class: "amount", title: what === "Bytes" ? `${exact} bytes` : null }, text);
}

/** Return bytes in the largest unit that they are a whole number of: 1 GiB, 24 MB, 1,000,001 B. */
function bytes(value) {
  const [unit, each] = Object.entries(UNITS).find(([, each]) => value > 0 && value % each === 0) ?? ["B", 1];
  return `${(value / each).toLocaleString("en")} ${unit}`;
}
