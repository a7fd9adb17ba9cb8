// A heat map: the value of a buffer, or its sum in blocks if it is large.

import { h, put, say } from "./dom.js";
import { colour, onTheme } from "./plot.js";
import { general } from "./words.js";

/** The share of cells whose magnitude is within the colours' range: a few outliers would make the others pale. */
const RANGE_SHARE = 0.98;

/** Return a heat map in `host`, whose `set` takes the server's `heat_map` and the buffer's shape. */
export function heatMap(host, signal) {
  const canvas = h("canvas", { class: "heat", role: "img" });
  const legend = h("canvas", { class: "legend", width: 65, height: 1, "aria-hidden": "true" });
  const ends = [h("span"), h("span", {}, "0"), h("span")];
  const note = h("p", { class: "muted" });
  put(host, canvas, h("div", { class: "legend-line" }, legend, h("div", { class: "scale" }, ends)), note);
  let [map, shape] = [null, []];

  const draw = () => {
    if (map === null) return;
    const range = rangeOf(map.values);
    const paint = painter(range);
    [canvas.width, canvas.height] = [map.columns, map.rows];
    canvas.style.aspectRatio = `${map.columns} / ${map.rows}`;
    fill(canvas, (row, column) => paint(map.values[row][column]));
    fill(legend, (_, column) => paint((range * (column - 32)) / 32));
    say(ends[0], general(-range, 2));
    say(ends[2], general(range, 2));
    canvas.setAttribute(
      "aria-label",
      `Heat map of ${map.rows} by ${map.columns} cells, from ${general(-range, 2)} to ${general(range, 2)}`,
    );
    say(note, about(map, shape));
  };
  canvas.addEventListener("pointermove", (event) => {
    if (map === null) return;
    const [row, column] = [
      Math.floor((event.offsetY / canvas.clientHeight) * map.rows),
      Math.floor((event.offsetX / canvas.clientWidth) * map.columns),
    ];
    const value = map.values[row]?.[column];
    if (value !== undefined)
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
  const sizes = values
    .flat()
    .filter((value) => value !== null)
    .map(Math.abs)
    .sort((a, b) => a - b);
  return sizes[Math.floor((sizes.length - 1) * RANGE_SHARE)] || sizes.at(-1) || 1;
}

/** Return a function from a value to [red, green, blue]. */
function painter(range) {
  const [zero, up, down, bad] = ["raised", "positive", "negative", "bad"].map((name) => parts(colour(name)));
  return (value) => {
    if (value === null) return bad;
    const share = Math.min(Math.abs(value) / range, 1);
    const end = value < 0 ? down : up;
    return zero.map((from, place) => from + (end[place] - from) * share);
  };
}

function parts(text) {
  return text
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
}

function fill(canvas, at) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let place = 0; place < canvas.width * canvas.height; place += 1) {
    const [red, green, blue] = at(Math.floor(place / canvas.width), place % canvas.width);
    image.data.set([red, green, blue, 255], place * 4);
  }
  context.putImageData(image, 0, 0);
}
