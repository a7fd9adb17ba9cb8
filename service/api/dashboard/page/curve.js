// The picture of an element-wise gradient: dX over X for dY = 1, as the server computes it.

import { h, mark, put, say, scroller, table } from "./dom.js";
import { asNumbers, plot } from "./plot.js";
import { general } from "./words.js";

/**
 * How to draw each element-wise gradient. `forward` makes Y of X for those that take the output of their activation.
 * `attribute` has a slider, from `least` to `most`.
 */
const CURVES = {
  ReluGrad: {},
  LeakyReluGrad: { forward: (x, alpha) => (x > 0 ? x : alpha * x), attribute: "alpha", least: -1, most: 2 },
  SigmoidGrad: { forward: (x) => 1 / (1 + Math.exp(-x)) },
  TanhGrad: { forward: Math.tanh },
  QuickGeluGrad: { attribute: "alpha", least: 0, most: 4 },
};

const X = Array.from({ length: 201 }, (_, place) => (place - 100) / 20); // -5 to 5
const TABLE_STEP = 5; // the table has each fifth point: 41 rows
const HINT = "X from -5 to 5. Point at the curve to read it.";

/**
 * Return the picture of an operator: {element, draw}, or null if it has none. `draw()` asks the server again, with the
 * form's attributes.
 */
export function curvePanel(operator, { api, form, signal }) {
  const curve = CURVES[operator.name];
  if (!curve) return null;
  const field = curve.attribute ? form.field(curve.attribute) : null;
  let dX = [];
  const chart = plot({
    signal,
    height: 280,
    x: { format: (each) => general(each, 3) },
    y: { format: (each) => general(each, 3), range: (least, most) => padded(Math.min(0, least), Math.max(1, most)) },
    cross: true,
    moved: (place) => say(reading, place === null ? HINT : `X = ${X[place]}   dX = ${dX[place]}`),
  });
  const reading = h("p", { class: "muted reading" });
  const picture = h("div", {}, chart.element, reading);
  const points = scroller("Points of the curve", "points");
  const note = h("span", { class: "muted" }, "for dY = 1, computed by the server");
  const slide = field && slider(curve, field);
  const head = h("h2", {}, "dX over X", note, asNumbers(null, points, picture));
  const element = h("section", { class: "panel curve" }, head, picture, points, slide?.element);
  let asking = new AbortController();
  async function draw() {
    asking.abort();
    asking = new AbortController();
    slide?.follow();
    try {
      dX = await computed(operator, curve, field, api, AbortSignal.any([signal, asking.signal]));
      const words = [-5, -1, 0, 1, 5].map((x) => `${general(dX[X.indexOf(x)], 3)} at ${x}`).join(", ");
      chart.set(X, [{ label: "dX", colour: "accent", values: dX }], `dX over X from -5 to 5: ${words}`);
      put(points, numbers(dX));
      say(reading, HINT);
      mark(picture, "class", null);
    } catch (error) {
      if (error.name === "AbortError") return;
      mark(picture, "class", "old");
      if (!(error.parameter && form.refuse(error.parameter, error.message))) say(reading, error.message);
    }
  }
  return { element, draw };
}

/** A slider that writes into the field of an attribute, as the reader could. */
function slider({ attribute, least, most }, field) {
  const input = h("input", { type: "range", min: least, max: most, step: 0.01, "aria-label": attribute });
  const shown = h("output", { class: "mono" });
  input.addEventListener("input", () => {
    field.control.value = input.value;
    field.control.dispatchEvent(new Event("input", { bubbles: true }));
  });
  return {
    element: h("div", { class: "line slide" }, h("code", {}, attribute), input, shown),
    follow() {
      input.value = field.control.value;
      say(shown, field.control.value);
    },
  };
}

/** Ask the server for dX at all X. */
async function computed(operator, { forward }, field, api, signal) {
  const given = field?.value();
  const alpha = Number(given?.text ?? field?.usual);
  const inputs = forward ? { Y: X.map((x) => forward(x, alpha)) } : { X };
  const tensors = { dY: X.map(() => 1), ...inputs };
  const named = Object.entries(tensors).map(([name, data]) => [name, { dtype: "float64", data: data.map(written) }]);
  const query = given ? `?${given.name}=${encodeURIComponent(given.text)}` : "";
  const { dX } = await api.post(`v1/ops/${operator.name}${query}`, Object.fromEntries(named), { signal });
  return dX.data.map(Number);
}

/** JSON has no NaN and no infinities: the server reads them as strings. */
function written(number) {
  return Number.isFinite(number) ? number : String(number);
}

function numbers(dX) {
  const row = (x, y) => h("tr", {}, h("th", { scope: "row" }, x), h("td", { "data-x": x }, String(y)));
  const rows = X.flatMap((x, place) => (place % TABLE_STEP === 0 ? [row(x, dX[place])] : []));
  return table("matrix", ["X", "dX"], rows);
}

function padded(low, high) {
  const room = (high - low || 1) * 0.06;
  return [low - room, high + room];
}
