// The picture of an element-wise gradient: dX over X for dY = 1, as the server computes it.

import { h, mark, put, say, svg } from "./dom.js";

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
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [560, 300, 44, 28, 12, 12];
const TABLE_STEP = 5; // the table has each fifth point: 41 rows

export function hasCurve(name) {
  return Object.hasOwn(CURVES, name);
}

/** Return the picture of an operator: {element, draw}. `draw()` asks the server again, with the form's attributes. */
export function curvePanel(operator, { api, form, signal }) {
  const curve = CURVES[operator.name];
  const field = curve.attribute ? form.field(curve.attribute) : null;
  const plot = h("div", { class: "plot" });
  const reading = h("p", { class: "muted reading" });
  const group = { tabindex: "0", role: "group", "aria-label": "Points of the curve" };
  const table = h("div", { class: "scroll points", hidden: true, ...group });
  const toggle = h("button", { type: "button", class: "quiet", "aria-expanded": "false" }, "As numbers");
  toggle.addEventListener("click", () => {
    table.hidden = !table.hidden;
    plot.hidden = reading.hidden = !table.hidden;
    mark(toggle, "aria-expanded", String(!table.hidden));
  });
  const slide = field && slider(curve, field);
  const element = h(
    "section",
    { class: "panel curve" },
    h("h2", {}, "dX over X", h("span", { class: "muted" }, "for dY = 1, computed by the server"), toggle),
    plot,
    reading,
    table,
    slide?.element,
  );
  let asking = new AbortController();
  async function draw() {
    asking.abort();
    asking = new AbortController();
    slide?.follow();
    try {
      const points = await computed(operator, curve, field, api, AbortSignal.any([signal, asking.signal]));
      put(plot, picture(points, reading));
      put(table, numbers(points));
      mark(plot, "class", "plot");
    } catch (error) {
      if (error.name === "AbortError") return;
      mark(plot, "class", "plot old");
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

/** Ask the server for dX at all X. Return [[x, dX], ...]. */
async function computed(operator, { forward }, field, api, signal) {
  const given = field?.value();
  const alpha = Number(given?.text ?? field?.usual);
  const inputs = forward ? { Y: X.map((x) => forward(x, alpha)) } : { X };
  const tensors = { dY: X.map(() => 1), ...inputs };
  const named = Object.entries(tensors).map(([name, data]) => [name, { dtype: "float64", data: data.map(written) }]);
  const query = given ? `?${given.name}=${encodeURIComponent(given.text)}` : "";
  const { dX } = await api.post(`v1/ops/${operator.name}${query}`, Object.fromEntries(named), { signal });
  return X.map((x, place) => [x, Number(dX.data[place])]);
}

/** JSON has no NaN and no infinities: the server reads them as strings. */
function written(number) {
  return Number.isFinite(number) ? number : String(number);
}

function numbers(points) {
  const some = points.filter((_, place) => place % TABLE_STEP === 0);
  const rows = some.map(([x, y]) => h("tr", {}, h("th", { scope: "row" }, x), h("td", { "data-x": x }, String(y))));
  return h(
    "table",
    { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "X"), h("th", { scope: "col" }, "dX"))),
    h("tbody", {}, rows),
  );
}

function picture(points, reading) {
  const finite = points.map(([, y]) => y).filter(Number.isFinite);
  const [low, high] = padded(Math.min(0, ...finite), Math.max(1, ...finite));
  const across = (x) => LEFT + ((x + 5) / 10) * (WIDTH - LEFT - RIGHT);
  const up = (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const steps = ticks(low, high);
  const at = (x) => points.find(([each]) => each === x)?.[1];
  const words = [-5, -1, 0, 1, 5].map((x) => `${brief(at(x))} at ${x}`).join(", ");
  const hair = svg("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const dot = svg("circle", { class: "dot", r: 4, visibility: "hidden" });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `dX over X from -5 to 5: ${words}` },
    steps.map((y) => rule(y, up(y))),
    steps.map((y) => svg("text", { x: LEFT - 8, y: up(y) + 4, "text-anchor": "end" }, brief(y))),
    svg("line", { class: "zero", x1: across(0), x2: across(0), y1: TOP, y2: HEIGHT - BOTTOM }),
    [-4, -2, 0, 2, 4].map((x) => svg("text", { x: across(x), y: HEIGHT - 8, "text-anchor": "middle" }, x)),
    svg("path", { class: "trace", d: pathOf(points, across, up) }),
    hair,
    dot,
  );
  say(reading, "X from -5 to 5. Point at the curve to read it.");
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const [px, py] = points[Math.min(200, Math.max(0, Math.round(x * 200)))];
    for (const name of ["x1", "x2"]) mark(hair, name, across(px));
    mark(dot, "cx", across(px));
    mark(dot, "cy", Number.isFinite(py) ? up(py) : up(0));
    for (const each of [hair, dot]) mark(each, "visibility", "visible");
    say(reading, `X = ${px}   dX = ${py}`);
  });
  return drawing;
}

function rule(y, height) {
  return svg("line", { class: y === 0 ? "zero" : "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: height, y2: height });
}

function pathOf(points, across, up) {
  let pen = "M";
  return points.map(([x, y]) => {
    if (!Number.isFinite(y)) return (pen = "M") && "";
    const step = `${pen}${across(x).toFixed(2)},${up(y).toFixed(2)}`;
    pen = "L";
    return step;
  }).join("");
}

function padded(low, high) {
  const room = (high - low || 1) * 0.06;
  return [low - room, high + room];
}

/** Return three to seven round numbers between two. */
function ticks(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const first = Math.ceil(low / step);
  const length = Math.floor(high / step) - first + 1;
  return Array.from({ length }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

function brief(number) {
  return String(Number(Number(number).toPrecision(3)));
}
