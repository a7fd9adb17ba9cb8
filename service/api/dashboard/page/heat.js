// A heat map: the value of a buffer, or its sum in blocks if it is large.

import { h, mark, put, say } from "./dom.js";
import { colour, onTheme } from "./plot.js";
import { general } from "./words.js";

/** The share of cells whose magnitude is within the colours' range: a few outliers would make the others pale. */
const RANGE_SHARE = 0.98;

/** The values in the legend, as shares of the range. */
const LEGEND = Array.from({ length: 65 }, (_, column) => (column - 32) / 32);

/** Return a heat map in `host`, whose `set` takes the server's `heat_map` and the buffer's shape. */
export function heatMap(host, signal) {
  const canvas = h("canvas", { class: "heat", role: "img" });
  const legend = h("canvas", { class: "legend", "aria-hidden": "true" });
  const ends = [h("span"), h("span", {}, "0"), h("span")];
  const note = h("p", { class: "muted" });
  put(host, canvas, h("div", { class: "legend-line" }, legend, h("div", { class: "scale" }, ends)), note);
  let [map, shape] = [null, []];

  const draw = () => {
    if (map === null) return;
    const range = rangeOf(map.values);
    const [low, high] = [general(-range, 2), general(range, 2)];
    const paint = painter(range);
    fill(canvas, map.values, paint);
    fill(legend, [LEGEND.map((share) => share * range)], paint);
    canvas.style.aspectRatio = `${map.columns} / ${map.rows}`;
    say(ends[0], low);
    say(ends[2], high);
    mark(canvas, "aria-label", `Heat map of ${map.rows} by ${map.columns} cells, from ${low} to ${high}`);
    say(note, about(map, shape));
  };
  canvas.addEventListener("pointermove", (event) => {
    if (map === null) return;
    const row = Math.floor((event.offsetY / canvas.clientHeight) * map.rows);
    const column = Math.floor((event.offsetX / canvas.clientWidth) * map.columns);
    const value = map.values[row]?.[column];
    if (value === undefined) return;
    say(note, `row ${row}, column ${column}: ${value === null ? "not finite" : general(value)}`);
  });
  canvas.addEventListener("pointerleave", () => map && say(note, about(map, shape)));
  onTheme(signal, draw);
  return {
    set(given, dims) {
      [map, shape] = [given, dims];
      draw();
    },
  };
}

function about(map, shape) {
  const columns = shape.at(-1) ?? 1;
  const rows = shape.slice(0, -1).reduce((all, each) => all * each, 1);
  const whole = map.rows === rows && map.columns === columns;
  const cells = whole ? "A cell is an element." : `${map.rows} × ${map.columns} cells, each the mean of its elements.`;
  return `${cells} Red cells have no finite element.`;
}

function rangeOf(values) {
  const known = values.flat().filter((value) => value !== null);
  const sizes = known.map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor((sizes.length - 1) * RANGE_SHARE)] || sizes.at(-1) || 1;
}

/** Return the [red, green, blue] of a colour of page.css. */
function parts(name) {
  return colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
}

/** Return a function from a value to such parts. */
function painter(range) {
  const [zero, up, down, bad] = ["raised", "positive", "negative", "bad"].map(parts);
  return (value) => {
    if (value === null) return bad;
    const share = Math.min(Math.abs(value) / range, 1);
    const end = value < 0 ? down : up;
    return zero.map((from, place) => from + (end[place] - from) * share);
  };
}

/** Make the canvas as large as the rows of values, with a pixel for each. */
function fill(canvas, rows, paint) {
  [canvas.width, canvas.height] = [rows[0].length, rows.length];
  const pixels = rows.flat().flatMap((value) => [...paint(value), 255]);
  canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels), canvas.width), 0, 0);
}
