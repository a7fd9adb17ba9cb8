// A chart whose lines grow. All of them share the time axis, and the cursor of one shows in the others.

import { colour, onTheme } from "./charts.js";
import { h, mark, put, say } from "./dom.js";
import UPlot from "./uPlot.esm.js";
import { time } from "./words.js";

const HEIGHT = 150;
const AXIS_WIDTH = 62;
const SERIES = 7; // colours in views.css
const TABLE_ROWS = 30;
const SYNC = "service";

/** Steps of an axis that counts things. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/**
 * Return a chart: {element, set, aside}. `set({at, lines, range})` shows lines {label, colour, values} over the times
 * `at`, with values null where nothing is known. `aside` is the text beside the title. `choose` is called with another
 * choice of the reader.
 */
export function liveChart(description, { signal, choose }) {
  const { id, title, note, format, choices, chosen } = description;
  const plot = h("div", { class: "plot" });
  const legend = h("ul", { class: "lines" });
  const label = `${title} as numbers`;
  const table = h("div", { class: "scroll numbers", tabindex: "0", role: "group", "aria-label": label, hidden: true });
  const aside = h("span", { class: "muted" }, note);
  const button = { type: "button", class: "quiet", "aria-expanded": "false", "aria-label": label };
  const toggle = h("button", button, "As numbers");
  const select = choices && h(
    "select",
    { "aria-label": `${title}: percentile`, onchange: () => choose(select.value) },
    choices.map((each) => h("option", { selected: each === chosen }, each)),
  );
  const head = h("h2", {}, title, aside, select, toggle);
  const element = h("section", { class: "panel live", "data-chart": id }, head, plot, table, legend);
  let [chart, shown, cursor] = [null, null, null];

  toggle.addEventListener("click", () => {
    table.hidden = !table.hidden;
    plot.hidden = !table.hidden;
    mark(toggle, "aria-expanded", String(!table.hidden));
    if (shown) set(shown);
  });
  const sized = new ResizeObserver(() => {
    if (plot.clientWidth && chart) chart.setSize({ width: plot.clientWidth, height: HEIGHT });
    else if (plot.clientWidth && shown) draw(shown);
  });
  sized.observe(plot);
  onTheme(signal, () => shown && draw(shown, true));
  signal.addEventListener("abort", () => {
    sized.disconnect();
    chart?.destroy();
  });

  function set(given) {
    const isOther = shown === null || String(shown.lines.map(named)) !== String(given.lines.map(named));
    shown = given;
    if (isOther) put(legend, given.lines.length ? given.lines.map(entry) : h("li", {}, "none in this time"));
    if (!table.hidden) put(table, given.lines.length ? numbers(given, format) : null);
    else draw(given, isOther);
    tell();
  }

  function draw({ at, lines, range }, isOther = chart === null) {
    if (!plot.clientWidth) return;
    const data = [at, ...lines.map((each) => each.values)];
    if (!isOther && chart) return chart.batch(() => {
      chart.setData(data, false);
      chart.setScale("x", { min: range[0], max: range[1] });
    });
    chart?.destroy();
    chart = new UPlot(options(description, { plot, lines, range: () => shown.range, moved }), data, plot);
    chart.root.setAttribute("aria-hidden", "true"); // the text of the plot and the legend say it
  }

  function moved(index) {
    cursor = index;
    tell();
  }

  /** Write the numbers at the cursor, or else the last ones, into the legend; the last ones into the plot's text. */
  function tell() {
    const { at, lines } = shown;
    const place = cursor !== null && cursor < at.length ? cursor : at.length - 1;
    for (const [row, line] of lines.entries()) {
      const number = line.values[place] ?? null;
      const data = legend.children[row].querySelector("data");
      say(data, number === null ? "–" : format(number));
      mark(data, "value", number);
    }
    const last = ({ values }) => (isKnown(values.at(-1)) ? format(values.at(-1)) : "unknown");
    const words = lines.map((line) => `${line.label} ${last(line)}`);
    mark(plot, "aria-label", `${title}, now: ${words.join(", ") || "none"}`);
  }

  mark(plot, "role", "img");
  return { element, set, aside };
}

const named = ({ label, colour: each }) => `${label}/${each}`;
const isKnown = (number) => number !== null && number !== undefined;
const colourOf = (line, place) => line.colour ?? `series-${(place % SERIES) + 1}`;

function entry(line, place) {
  const style = { color: `var(--${colourOf(line, place)})` };
  const swatch = h("span", { class: "swatch", "aria-hidden": "true", style });
  return h("li", {}, swatch, h("span", {}, line.label), h("data"));
}

function options({ format, isLog, isWhole }, { plot, lines, range, moved }) {
  const axis = { stroke: colour("muted"), font: "11px system-ui", ticks: { show: false } };
  return {
    width: plot.clientWidth,
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: SYNC }, points: { size: 6 } },
    hooks: { setCursor: [(chart) => moved(chart.cursor.left >= 0 ? chart.cursor.idx : null)] },
    scales: { x: { time: true, range }, y: isLog ? { distr: 3 } : { range: (_, __, most) => [0, roomy(most)] } },
    axes: [
      { ...axis, size: 24, space: 70, grid: { show: false }, values: (_, splits) => splits.map(clock) },
      {
        ...axis,
        size: AXIS_WIDTH,
        space: 28,
        ...(isWhole ? { incrs: WHOLE } : {}),
        ...(isLog ? { filter: powers } : {}),
        grid: { stroke: colour("line"), width: 1, ...(isLog ? { filter: powers } : {}) },
        values: (_, splits) => splits.map((each) => (isKnown(each) ? format(each) : "")),
      },
    ],
    series: [{}, ...lines.map((line, place) => ({
      label: line.label,
      stroke: colour(colourOf(line, place)),
      width: 1.5,
      points: { show: true, size: 4, fill: colour(colourOf(line, place)), filter: alone },
      spanGaps: false,
    }))],
  };
}

/** A number between two that are not known has no line, so it is a point. */
function alone(chart, series) {
  const values = chart.data[series];
  return [...values.keys()].filter((at) => isKnown(values[at]) && !isKnown(values[at - 1]) && !isKnown(values[at + 1]));
}

/** An axis in powers of ten has marks for these alone. */
function powers(_, splits) {
  return splits.map((each) => (Number.isInteger(Math.round(Math.log10(each) * 1e6) / 1e6) ? each : null));
}

/** The end of an axis from 0. A chart of nothing but zeros shows them at its foot. */
function roomy(most) {
  return most > 0 ? most * 1.12 : 1;
}

function clock(seconds) {
  const at = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const minute = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return at.getSeconds() ? `${minute}:${two(at.getSeconds())}` : minute;
}

/** The last samples as a table, the latest first. */
function numbers({ at, lines }, format) {
  const places = [...at.keys()].slice(-TABLE_ROWS).reverse();
  const cells = (place) => lines.map(({ values }) => {
    const number = values[place];
    return h("td", { class: "number" }, isKnown(number) ? h("data", { value: number }, format(number)) : "–");
  });
  const titles = lines.map(({ label }) => h("th", { scope: "col", class: "number" }, label));
  const head = h("tr", {}, h("th", { scope: "col" }, "time"), titles);
  const clocked = (place) => h("th", { scope: "row" }, time(at[place]).slice(11, 19));
  const rows = places.map((place) => h("tr", { "data-at": at[place] }, clocked(place), cells(place)));
  return h("table", { class: "plain" }, h("thead", {}, head), h("tbody", {}, rows));
}
