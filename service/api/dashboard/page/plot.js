// Charts of lines over x, each with a text for readers of a screen. Only this module knows uPlot.

import { button, h, mark } from "./dom.js";
import UPlot from "./uPlot.esm.js";

/** Steps of an axis that counts things. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/** Return a colour of page.css, as a canvas takes it: the value of a custom property, in the theme of now. */
export function colour(name) {
  const probe = h("span", { style: { color: `var(--${name})` }, hidden: true });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** Call `draw` whenever the theme changes, until the signal aborts. */
export function onTheme(signal, draw) {
  window.addEventListener("theme", draw, { signal });
}

/**
 * Return a chart: {element, set}. `set(x, lines, text)` shows lines {label, colour, values} over the numbers `x`, with
 * null where a value is not known. A value that is not finite is a red mark on the axis.
 *
 * An axis, `x` or `y`, is {format, isWhole, isLog, isTime, range}: `isWhole` counts things, `isLog` has powers of ten,
 * `range(least, most)` returns its ends. With `dots` each number has one; with `cross` the lines of 0 are drawn.
 * Charts with the same `sync` share the cursor. `moved` is called with its place in `x`, null without a cursor.
 */
export function plot({ signal, height, x, y, dots = false, cross = false, sync = null, moved = () => {} }) {
  const element = h("div", { class: "plot", role: "img", style: { "min-height": `${height}px` } });
  let [chart, drawn, given] = [null, "", null];
  function draw(isOther = false) {
    if (!element.clientWidth || given === null) return;
    const [{ lines }, data] = [given, [given.x, ...given.lines.map((each) => each.values.map(finite))]];
    const names = lines.map((each) => `${each.label}/${each.colour}`).join();
    if (chart && names === drawn && !isOther) return chart.setData(data);
    chart?.destroy();
    chart = new UPlot(options(), data, element);
    chart.root.setAttribute("aria-hidden", "true"); // the text of the element says it
    drawn = names;
  }
  function options() {
    return {
      width: element.clientWidth,
      height,
      padding: [8, 24, 0, 0], // half of the last time fits
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: sync }, points: { size: 6 } },
      hooks: {
        setCursor: [(of) => moved(of.cursor.left >= 0 ? of.cursor.idx : null)],
        drawAxes: cross ? [drawCross] : [],
        draw: [(of) => given.lines.forEach((line) => drawIll(of, line.values))],
      },
      scales: { x: { time: Boolean(x.isTime), ...scale(x) }, y: scale(y) },
      axes: [axis(x, { size: 24, space: 70 }), axis(y, { size: 62, space: 28 }, { stroke: colour("line"), width: 1 })],
      series: [{}, ...given.lines.map((line) => series(line, dots))],
    };
  }
  const sized = new ResizeObserver(() => {
    if (element.clientWidth) chart?.setSize({ width: element.clientWidth, height });
    draw();
  });
  sized.observe(element);
  onTheme(signal, () => draw(true));
  signal.addEventListener("abort", () => {
    sized.disconnect();
    chart?.destroy();
  });
  return {
    element,
    set(at, lines, text) {
      given = { x: at, lines };
      mark(element, "aria-label", text);
      draw();
    },
  };
}

function scale({ isLog, range }) {
  if (isLog) return { distr: 3 };
  return range ? { range: (_, least, most) => range(least, most) } : {};
}

function axis({ format, isWhole, isLog }, room, grid = null) {
  const only = isLog ? { filter: powers } : {};
  return {
    ...room,
    ...only,
    ...(isWhole ? { incrs: WHOLE } : {}),
    stroke: colour("muted"),
    font: "11px system-ui",
    ticks: { show: false },
    grid: grid ? { ...grid, ...only } : { show: false },
    values: (_, splits) => splits.map((each) => (isKnown(each) ? format(each) : "")),
  };
}

function series({ label, colour: name, values }, dots) {
  const points = { show: true, size: dots ? 5 : 4, fill: colour(name), filter: dots ? null : alone };
  return { label, stroke: colour(name), width: 1.5, points, spanGaps: false, pxAlign: 0 };
}

export const isKnown = (number) => number !== null && number !== undefined;

/** A number between two that are not known has no line, so it is a point. */
function alone(chart, place) {
  const values = chart.data[place];
  return [...values.keys()].filter((at) => isKnown(values[at]) && !isKnown(values[at - 1]) && !isKnown(values[at + 1]));
}

/** An axis in powers of ten has marks for these alone. */
function powers(_, splits) {
  return splits.map((each) => (Number.isInteger(Math.round(Math.log10(each) * 1e6) / 1e6) ? each : null));
}

const finite = (number) => (Number.isFinite(number) ? number : null);

/** Draw a mark on the axis for each value that is not finite. */
function drawIll({ ctx, bbox, data, valToPos }, values) {
  ctx.fillStyle = colour("bad");
  const size = 8 * devicePixelRatio;
  const places = [...values.keys()].filter((place) => isKnown(values[place]) && !Number.isFinite(values[place]));
  for (const x of places.map((place) => valToPos(data[0][place], "x", true)))
    ctx.fillRect(x - size / 4, bbox.top + bbox.height - size, size / 2, size);
}

function drawCross({ ctx, bbox, valToPos }) {
  ctx.fillStyle = colour("muted");
  ctx.fillRect(valToPos(0, "x", true), bbox.top, 1, bbox.height);
  ctx.fillRect(bbox.left, valToPos(0, "y", true), bbox.width, 1);
}

/** Hide a table of numbers; return the button that shows it in place of a picture, and calls `changed` then. */
export function asNumbers(label, table, picture, changed = () => {}) {
  table.hidden = true;
  const toggle = () => {
    [table.hidden, picture.hidden] = [!table.hidden, table.hidden];
    mark(shows, "aria-expanded", String(!table.hidden));
    changed();
  };
  const shows = button("As numbers", toggle, { class: "quiet", "aria-expanded": "false", "aria-label": label });
  return shows;
}
