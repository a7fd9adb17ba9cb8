// One operator: what it computes, a form that runs it, its answer, and the same call for a shell and for Python.

import { bodyOf, curlOf, pathOf, pythonOf } from "./calls.js";
import { copyBox } from "./copy.js";
import { curvePanel } from "./curve.js";
import { empty, h, mark, prose, put, say, scroller, table } from "./dom.js";
import { operatorForm } from "./form.js";
import { tensorTables } from "./matrix.js";

/** The page reads numbers from lists. Without this, an input in base64 gets its answer in base64. */
const LISTS = { name: "encoding", type: "str", text: "list" };

const REDRAW_MS = 60; // between a change in the form and the request for the curve, which then follows a slider

export async function show(main, { api, signal, families, operator, name, keys }) {
  document.title = `${name} – gradserve`;
  const list = names(families, name);
  if (operator === undefined) return put(main, list, empty("Operator not found", name));
  const answer = answerPanel(operator);
  const calls = callBoxes(keys);
  const form = operatorForm(operator, { run: () => run(form, answer, { api, signal }), changed });
  const curve = curvePanel(operator, { api, form, signal });
  let timer;
  function changed() {
    calls.follow(form.call());
    clearTimeout(timer);
    if (curve) timer = setTimeout(curve.draw, REDRAW_MS);
  }
  const panel = h("section", { class: "panel" }, h("h2", {}, "Run it"), form.element);
  const left = h("div", {}, panel, answer.element, curve && calls.elements);
  const right = h("div", {}, curve?.element, signaturePanel(operator), !curve && calls.elements);
  const article = h("article", {}, heading(operator), h("div", { class: "columns" }, left, right));
  put(main, h("div", { class: "operator" }, list, article));
  calls.follow(form.call());
  await curve?.draw();
}

/** The operators by family: the family of the chosen one is open. */
function names(families, chosen) {
  const item = ({ name }) => {
    const current = name === chosen && "page";
    return h("li", {}, h("a", { href: `#/operators/${encodeURIComponent(name)}`, "aria-current": current }, name));
  };
  const family = ([title, operators]) => {
    const open = operators.some((each) => each.name === chosen);
    return h("details", { open }, h("summary", {}, title), h("ul", {}, operators.map(item)));
  };
  const all = h("a", { href: "#/operators", class: "all" }, "All operators");
  return h("nav", { class: "names", "aria-label": "Operators" }, all, families.map(family));
}

function heading({ name, formula, description }) {
  const line = h("p", { class: "formula" }, prose(formula.replace(/\.$/, "")));
  const paragraphs = description.split(/\n\n+/).filter(Boolean);
  const about = paragraphs.map((each) => h("p", {}, prose(each.replaceAll("\n", " "))));
  return h("header", { class: "about" }, h("h1", {}, name), line, about);
}

function signaturePanel({ inputs, outputs, attributes, example }) {
  const inputRow = (each) => tensorRow(each, shapesText(each, example.request[each.name]));
  const outputRow = (each) => tensorRow(each, shapesText(each, example.answer[each.name]));
  const tables = [
    signature(["Input", "type", "shape"], inputs.map(inputRow)),
    signature(["Output", "type", "shape"], outputs.map(outputRow)),
    signature(["Type", "dtypes, the usual one first"], variableRows([...inputs, ...outputs])),
    signature(["Attribute", "type", "default"], attributes.map(attributeRow)),
  ];
  const label = "Tensors and attributes";
  const title = h("h2", {}, label, h("span", { class: "muted" }, "with the shapes of the example"));
  return h("section", { class: "panel" }, title, scroller(label, "", tables));
}

function signature(titles, rows) {
  const wide = (place) => (titles.length === 2 && place === 1 ? 2 : null);
  const heads = titles.map((each, place) => h("th", { scope: "col", colspan: wide(place) }, each));
  return rows.length > 0 && table("plain signature", heads, rows);
}

/** The shape of a tensor, or that of each tensor of a group. */
function shapesText({ group }, value) {
  if (value === undefined) return "left out";
  if (!group) return shapeText(shapeOf(value));
  return Object.entries(value).map(([name, each]) => `${name} ${shapeText(shapeOf(each))}`).join(", ");
}

function tensorRow(tensor, shape) {
  const name = h("code", {}, parted(tensor.group ? `${tensor.name}.*` : tensor.name));
  const title = h("th", { scope: "row" }, name, tensor.optional && h("span", { class: "muted" }, " optional"));
  return h("tr", {}, title, h("td", {}, tensor.type_variable ?? typesOf(tensor)), h("td", { class: "mono" }, shape));
}

/** The dtypes of each type variable, once: tensors of one variable have one dtype. */
function variableRows(tensors) {
  const known = new Map(tensors.filter((each) => each.type_variable).map((each) => [each.type_variable, each]));
  return [...known].map(([variable, tensor]) =>
    h("tr", {}, h("th", { scope: "row" }, variable), h("td", { colspan: 2 }, typesOf(tensor))),
  );
}

/** The dtypes, the one of a list without dtype first. */
function typesOf({ dtypes, default_dtype: usual }) {
  const others = dtypes.filter((each) => each !== usual);
  return [usual, others.length > 0 && h("span", { class: "muted" }, `, ${others.join(", ")}`)];
}

function attributeRow({ name, type, required, default: usual }) {
  const value = usual === null ? h("span", { class: "muted" }, required ? "required" : "left out") : String(usual);
  const title = h("th", { scope: "row" }, h("code", {}, parted(name)));
  return h("tr", {}, title, h("td", {}, type), h("td", { class: "mono" }, value));
}

/** A long name breaks after its underscores. */
function parted(name) {
  return name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);
}

/** The shape of a tensor, which says it, or else that of its lists. */
function shapeOf(value) {
  if (value?.shape !== undefined) return value.shape;
  if (value?.data !== undefined) return shapeOf(value.data);
  return Array.isArray(value) ? [value.length, ...(value.length ? shapeOf(value[0]) : [])] : [];
}

function shapeText(shape) {
  return shape.length ? `[${shape.join(", ")}]` : "scalar";
}

function callBoxes(keys) {
  const why = "An input is not JSON yet.";
  const boxes = [[copyBox("curl", why, "wrap"), curlOf], [copyBox("Python", why), pythonOf]];
  const [base] = document.baseURI.split("#");
  return {
    elements: boxes.map(([box]) => box.element),
    follow: (call) => boxes.forEach(([box, text]) => box.show(call && text(call, base, keys))),
  };
}

/** The place of the answer: first that of the catalogue's example, then the server's to what the reader ran. */
function answerPanel(operator) {
  const status = h("p", { class: "muted status", role: "status" }, "The answer to the example. Run asks the server.");
  const tables = (answer) => tensorsOf(answer).map(([name, tensor]) => tensorTables(name, tensor));
  const values = h("div", { class: "results" }, tables(operator.example.answer));
  function show(words, ...nodes) {
    say(status, words);
    mark(values, "class", "results");
    put(values, nodes);
  }
  return {
    element: h("section", { class: "panel answer", "aria-label": "Answer" }, h("h2", {}, "Answer"), status, values),
    wait: () => mark(values, "class", "results old"),
    show: (words, tensors) => show(words, tables(tensors)),
    fail: (words, ...nodes) => show(words, h("div", { role: "alert" }, nodes)),
  };
}

/** The tensors of an answer by name; the tensor b of the group weights is weights.b. */
function tensorsOf(answer) {
  const members = (name, group) => Object.entries(group).map(([member, each]) => [`${name}.${member}`, each]);
  const isTensor = (one) => typeof one.dtype === "string";
  return Object.entries(answer).flatMap(([name, one]) => (isTensor(one) ? [[name, one]] : members(name, one)));
}

async function run(form, answer, { api, signal }) {
  form.tell();
  const call = form.call();
  if (call === null) {
    return answer.fail("Nothing was sent.", h("p", { class: "bad" }, "A field is empty, or not JSON; it says so."));
  }
  answer.wait();
  const id = api.newIdempotencyKey();
  const headers = { "X-Request-ID": id, "Content-Type": "application/json" };
  const began = performance.now();
  const took = () => `in ${(performance.now() - began).toFixed(1)} ms, request ${id}`;
  try {
    const path = pathOf({ ...call, attributes: [...call.attributes, LISTS] });
    const reply = await api.request(path, { method: "POST", headers, body: bodyOf(call), signal });
    const tensors = await reply.json();
    answer.show(`${reply.status} ${took()}`, tensors);
  } catch (error) {
    if (signal.aborted) return;
    const status = error.status ?? error.title ?? "The page failed";
    const name = error.tensor ?? error.parameter;
    if (name) form.refuse(name, error.message);
    const title = h("h3", {}, error.title ?? "The call failed");
    answer.fail(`${status} ${took()}`, title, h("p", { class: "bad" }, error.message));
  }
}
