// A chart of the service, whose lines grow: with a legend, and with its numbers as a table.

import { h, mark, put, say, scroller, table } from "./dom.js";
import { asNumbers, isKnown, plot } from "./plot.js";
import { time } from "./words.js";

const SERIES = 7; // colours in views.css
const TABLE_ROWS = 30;

/**
 * Return a chart: {element, set, aside}. `set({at, lines, range})` shows lines {label, colour, values} over the times
 * `at`, with values null where nothing is known. `aside` is the text beside the title. `choose` is called with another
 * choice of the reader.
 */
export function liveChart({ id, title, note, format, isLog, isWhole, choices, chosen }, { signal, choose }) {
  let [shown, cursor] = [null, null];
  const chart = plot({
    signal,
    height: 150,
    x: { isTime: true, format: clock, range: () => shown.range },
    y: { format, isLog, isWhole, range: (_, most) => [0, most > 0 ? most * 1.12 : 1] }, // only zeros are at its foot
    sync: "service",
    moved(index) {
      cursor = index;
      tell();
    },
  });
  const label = `${title} as numbers`;
  const listed = scroller(label, "numbers");
  const toggle = asNumbers(label, listed, chart.element, () => shown && set(shown));
  const legend = h("ul", { class: "lines" });
  const aside = h("span", { class: "muted" }, note);
  const select = choices && h(
    "select",
    { "aria-label": `${title}: percentile`, onchange: () => choose(select.value) },
    choices.map((each) => h("option", { selected: each === chosen }, each)),
  );
  const head = h("h2", {}, title, aside, select, toggle);
  const element = h("section", { class: "panel live", "data-chart": id }, head, chart.element, listed, legend);

  function set({ at, range, lines: given }) {
    const lines = given.map((line, place) => ({ ...line, colour: line.colour ?? `series-${(place % SERIES) + 1}` }));
    const isOther = shown === null || String(shown.lines.map(named)) !== String(lines.map(named));
    shown = { at, range, lines };
    if (isOther) put(legend, lines.length ? lines.map(entry) : h("li", {}, "none in this time"));
    if (!listed.hidden) put(listed, lines.length ? numbers(shown, format) : null);
    const last = ({ values }) => (isKnown(values.at(-1)) ? format(values.at(-1)) : "unknown");
    const words = lines.map((line) => `${line.label} ${last(line)}`).join(", ") || "none";
    chart.set(at, lines, `${title}, now: ${words}`);
    tell();
  }

  /** Write the numbers at the cursor, or else the last ones, into the legend. */
  function tell() {
    const { at, lines } = shown;
    const place = cursor !== null && cursor < at.length ? cursor : at.length - 1;
    for (const [row, line] of lines.entries()) {
      const number = line.values[place] ?? null;
      const data = legend.children[row].querySelector("data");
      say(data, number === null ? "–" : format(number));
      mark(data, "value", number);
    }
  }

  return { element, set, aside };
}

const named = ({ label, colour }) => `${label}/${colour}`;

function entry({ label, colour }) {
  const swatch = h("span", { class: "swatch", "aria-hidden": "true", style: { color: `var(--${colour})` } });
  return h("li", {}, swatch, h("span", {}, label), h("data"));
}

const clock = (seconds) => time(seconds).slice(11, 19).replace(/:00$/, "");

/** The last samples as a table, the latest first. */
function numbers({ at, lines }, format) {
  const places = [...at.keys()].slice(-TABLE_ROWS).reverse();
  const cells = (place) => lines.map(({ values }) => {
    const number = values[place];
    return h("td", { class: "number" }, isKnown(number) ? h("data", { value: number }, format(number)) : "–");
  });
  const titles = lines.map(({ label }) => h("th", { scope: "col", class: "number" }, label));
  const clocked = (place) => h("th", { scope: "row" }, time(at[place]).slice(11, 19));
  const rows = places.map((place) => h("tr", { "data-at": at[place] }, clocked(place), cells(place)));
  return table("plain", ["time", ...titles], rows);
}
