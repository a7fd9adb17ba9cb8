// The settings and limits in force, as a table that can be searched.

import { h, say, scroller, table } from "./dom.js";
import { many } from "./words.js";

/** Return the panel. */
export function settingsPanel({ settings, limits }) {
  const rows = [
    ...Object.entries(settings).map(([name, each]) => row(name, each)),
    ...Object.entries(limits).map(([name, each]) => row(name, each, "a limit without a setting")),
  ];
  const count = h("span", { class: "muted", role: "status" });
  const words = { placeholder: "Search", "aria-label": "Search settings and limits" };
  const search = h("input", { type: "search", oninput: find, ...words });
  function find() {
    const parts = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const each of rows) each.element.hidden = !parts.every((word) => each.text.includes(word));
    say(count, many(rows.filter((each) => !each.element.hidden).length, "line"));
  }
  find();
  const label = "Settings and limits in force";
  return h(
    "section",
    { class: "panel wide" },
    h("h2", { class: "line" }, label, count, search),
    scroller(label, "", table("plain settings", ["name", "value", "meaning"], rows.map((each) => each.element))),
  );
}

function row(name, { value, meaning }, note) {
  const text = `${name} ${value} ${meaning}`.toLowerCase();
  const written = value === null ? h("span", { class: "muted" }, "not set") : h("code", {}, shown(name, value));
  return {
    text,
    element: h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name)),
      h("td", {}, written),
      h("td", {}, meaning, note && h("span", { class: "muted" }, ` (${note})`)),
    ),
  };
}

/** Long numbers have commas between their thousands. A port is no amount. */
function shown(name, value) {
  return typeof value === "number" && !name.endsWith("_PORT") ? value.toLocaleString("en") : String(value);
}
