// The form of an operator: a field for each input and attribute, with the server's words about it beside it.

import { listText } from "./calls.js";
import { button, h, mark, say } from "./dom.js";

/**
 * Return the form of an operator, filled with its example: {element, call, tell, refuse, field}. `call()` returns what
 * the fields say, as calls.js has it, or null if a field is not JSON; `tell()` then marks such fields. `refuse` puts an
 * error at its field, and returns whether there is one.
 */
export function operatorForm(operator, { run, changed }) {
  const tensors = operator.inputs.map((each) => tensorField(each, operator.example.request[each.name]));
  const attributes = operator.attributes.map((each) => attributeField(each, operator.example.attributes[each.name]));
  const fields = [...tensors, ...attributes];
  const go = (event) => {
    event.preventDefault();
    run();
  };
  const listeners = {
    onsubmit: go,
    onkeydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && go(event),
    onchange(event) {
      alike(tensors, event.target);
      changed();
    },
    oninput(event) {
      fields.find((each) => each.control === event.target)?.say("");
      changed();
    },
  };
  const fill = button("Fill in the example", () => {
    fields.forEach((each) => each.fill());
    changed();
  });
  const buttons = h("div", { class: "line" }, h("button", { class: "main", title: "Ctrl + Enter" }, "Run"), fill);
  const elements = fields.map((each) => each.element);
  const element = h("form", { class: "fields", novalidate: true, ...listeners }, elements, buttons);
  fields.forEach((each) => each.fill());
  return {
    element,
    field: (name) => fields.find((each) => each.name === name),
    tell: () => fields.forEach((each) => each.say(each.fault())),
    refuse(name, words) {
      const [group] = name.split("."); // weights.fc.bias is a tensor of weights
      return fields.filter((each) => each.name === group).map((each) => each.say(words)).length > 0;
    },
    call() {
      if (fields.some((each) => each.fault())) return null;
      const given = (group) => group.map((each) => each.value()).filter(Boolean);
      return { operator, tensors: given(tensors), attributes: given(attributes) };
    },
  };
}

/** Tensors of one type variable have one dtype: choosing it for one chooses it for all. */
function alike(tensors, target) {
  const chosen = tensors.find((each) => each.dtype === target);
  if (!chosen?.variable) return;
  for (const each of tensors) {
    if (each.variable === chosen.variable && each.dtype) each.dtype.value = target.value;
  }
}

/** Attributes of a control whose text no browser completes or corrects. */
const TYPED = { autocomplete: "off", spellcheck: "false" };

let made = 0;

/** Return what all fields have: a label over the control, notes, and a place for words about what is wrong. */
function field(name, notes, control, aside) {
  const id = `field-${++made}`;
  const words = h("p", { class: "bad words", id: `${id}-words` });
  mark(control, "id", id);
  mark(control, "aria-describedby", words.id);
  const label = h("label", { for: id }, h("code", {}, name), notes && h("span", { class: "muted" }, notes));
  return {
    name,
    control,
    element: h("div", { class: "field" }, h("div", { class: "line label" }, label, aside), control, words),
    say(text) {
      say(words, text);
      mark(control, "aria-invalid", text ? "true" : null);
    },
  };
}

function tensorField(tensor, example) {
  const { name, dtypes, default_dtype: usual, type_variable: variable, optional, group } = tensor;
  const text = example === undefined ? "" : listText(example, group);
  const rows = Math.min(8, text.split("\n").length);
  const placeholder = optional ? "left out" : null;
  const area = h("textarea", { class: "mono", rows, placeholder, autocapitalize: "off", ...TYPED });
  const options = dtypes.map((each) => h("option", {}, each));
  const select = h("select", { "aria-label": `dtype of ${name}`, disabled: dtypes.length === 1 }, options);
  const dtype = group ? null : select; // each tensor of a group may say its own
  const notes = [optional && "optional", group && "an object of tensors, or a list"].filter(Boolean).join(", ");
  const base = field(name, notes, area, dtype);
  return {
    ...base,
    dtype,
    variable,
    fill() {
      area.value = text;
      if (dtype) dtype.value = usual;
      base.say("");
    },
    fault() {
      if (area.value.trim()) return notJson(area.value);
      return optional ? "" : `${name} is empty: write JSON, such as ${group ? '{"w": [1, 2]}' : "[[1, 2], [3, 4]]"}`;
    },
    value() {
      const written = area.value.trim().replace(/\s*\n\s*/g, " "); // no string of JSON contains a line break
      if (!written) return null;
      const own = group || dtype.value === usual || saysItself(written);
      return { name, text: written, dtype: own ? null : dtype.value, usual, group };
    },
  };
}

function notJson(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

/** An object, as in {"dtype": "float64", "data": [1]}, has a dtype of its own. */
function saysItself(text) {
  const value = JSON.parse(text);
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function attributeField({ name, type, default: usual, required }, example) {
  const choices = type.includes(" | ") && !/^(int|float|list)\b/.test(type) ? choicesOf(type) : null;
  const control = choices
    ? h("select", {}, choices.map((each) => h("option", {}, each)))
    : h("input", { type: "text", placeholder: required ? null : "left out", ...TYPED });
  const kind = type.startsWith("list[") ? `${type}, with commas` : choices ? "" : type;
  const base = field(name, [required && "required", kind].filter(Boolean).join(", "), control);
  const [unsent, filled] = [usual, example ?? usual].map((each) => (each === null ? "" : String(each)));
  return {
    ...base,
    usual,
    fill() {
      control.value = filled;
      base.say("");
    },
    fault: () => (required && !control.value.trim() ? `${name} is empty, but required` : ""),
    value() {
      const text = control.value.trim();
      return text === "" || (text === unsent && !required) ? null : { name, type, text };
    },
  };
}

/** The choices of an attribute. One that may be left out has the empty choice, too. */
function choicesOf(type) {
  const choices = type.split(" | ");
  return choices.includes("None") ? ["", ...choices.filter((each) => each !== "None")] : choices;
}
