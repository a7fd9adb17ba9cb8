// One call of an operator, in three forms: what the page sends, curl, and Python.

/**
 * A call is {operator, tensors: [{name, text, dtype, usual, group}], attributes: [{name, type, text}]}. A tensor's
 * `text` is JSON; its `dtype` is null if the text says it, or if it is the `usual` one, which a list has without saying
 * so. The text of a group is an object or a list of tensors.
 */
export function pathOf({ operator, attributes }) {
  const pairs = attributes.flatMap(({ name, type, text }) =>
    (type.startsWith("list[") ? listed(text) : [text]).map((each) => `${name}=${encodeURIComponent(each)}`),
  );
  return `v1/ops/${encodeURIComponent(operator.name)}${pairs.length ? `?${pairs.join("&")}` : ""}`;
}

/** Return the body. Numbers travel as the reader wrote them: JavaScript's would lose digits of int64. */
export function bodyOf({ tensors }) {
  const members = tensors.map(({ name, text, dtype }) => {
    const value = dtype === null ? text : `{"dtype": ${JSON.stringify(dtype)}, "data": ${text}}`;
    return `${JSON.stringify(name)}: ${value}`;
  });
  return `{${members.join(", ")}}`;
}

/** Return the command for a shell. A key stays out of it: the command reads it from the environment. */
export function curlOf(call, base, hasKeys) {
  return [
    `curl -s ${quoted(new URL(pathOf(call), base).href)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKeys ? ['-H "Authorization: Bearer $GRADSERVE_API_KEY"'] : []),
    `-d ${quoted(bodyOf(call))}`,
  ].join(" \\\n  ");
}

/** Return the same call with the Python client, which reads a key from the environment by itself. */
export function pythonOf(call, base) {
  const inputs = call.tensors.map((tensor) => `${tensor.name}=${pythonOfTensor(tensor)}`);
  const options = call.attributes.map(({ name, type, text }) => `${argumentOf(name)}=${pythonOfAttribute(text, type)}`);
  const outputs = call.operator.outputs.map((each) => each.name);
  const lines = [...inputs, ...options].map((each) => `        ${each},\n`).join("");
  const url = new URL(".", base).href.replace(/\/$/, "");
  const work = [
    `with Client(${JSON.stringify(url)}) as server:`,
    `    ${outputs.join(", ")} = server.ops.${call.operator.method}(`,
    `${lines}    )`,
    `print(${outputs.join(", ")}${outputs.length > 1 ? ', sep="\\n"' : ""})`,
  ].join("\n");
  return `${importsOf(work)}\n\n${work}\n`;
}

function importsOf(work) {
  const code = work.replace(/"(?:[^"\\]|\\.)*"/g, '""');
  const numbers = ["inf", "nan"].filter((each) => code.match(`\\b${each}\\b`)).join(", ");
  const own = [code.includes("base64.") && "import base64", numbers && `from math import ${numbers}`];
  const packages = [code.includes("ml_dtypes.") && "import ml_dtypes", code.includes("np.") && "import numpy as np"];
  const blocks = [own, [...packages, "from gradserve_client import Client"]];
  return blocks.map((each) => each.filter(Boolean).join("\n")).filter(Boolean).join("\n\n");
}

/** The name of an attribute as an argument: Python keeps the word lambda for itself. */
function argumentOf(name) {
  return name === "lambda" ? "lambda_" : name;
}

function pythonOfTensor({ text, dtype, usual, group }) {
  const value = JSON.parse(text);
  if (group) {
    const one = (member) => pythonOfTensor({ text: JSON.stringify(member), dtype: null, usual });
    if (Array.isArray(value)) return `[${value.map(one).join(", ")}]`;
    return `{${Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${one(member)}`).join(", ")}}`;
  }
  if (Array.isArray(value) || typeof value !== "object" || value === null) {
    return dtype === null ? pythonOfJson(text) : `np.array(${pythonOfJson(text)}, ${pythonOfDtype(dtype)})`;
  }
  const type = pythonOfDtype(value.dtype ?? usual);
  const shape = value.shape === undefined ? "" : `.reshape(${JSON.stringify(value.shape)})`;
  const data = pythonOfJson(JSON.stringify(value.data ?? null));
  if (value.base64 === undefined) return `np.array(${data}, ${type})${shape}`;
  return `np.frombuffer(base64.b64decode(${JSON.stringify(value.base64)}), ${type})${shape}`;
}

function pythonOfDtype(dtype) {
  return dtype === "bfloat16" ? "ml_dtypes.bfloat16" : JSON.stringify(dtype);
}

// ----- what a reader typed into a form, as text of JSON, of Python and of a shell -----

/** What Python writes otherwise than JSON: some words, and the numbers that JSON has as texts. */
const WORDS = {
  true: "True", false: "False", null: "None",
  '"NaN"': "nan", '"Infinity"': "inf", '"-Infinity"': "-inf",
};

/** The JSON text of nested lists, a line for each row of a matrix; of a group, a line for each of its tensors. */
export function listText(value, group = false) {
  if (group) {
    const members = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${JSON.stringify(each)}`);
    return `{${members.join(",\n ")}}`;
  }
  if (!Array.isArray(value)) return JSON.stringify(value);
  if (!value.some(Array.isArray)) return `[${value.map((each) => JSON.stringify(each)).join(", ")}]`;
  const inner = value.map((each) => listText(each).replaceAll("\n", "\n "));
  return `[${inner.join(",\n ")}]`;
}

/** The JSON text as Python: True for true, nan for "NaN". Numbers are written as the reader wrote them. */
function pythonOfJson(text) {
  const token = /"(?:[^"\\]|\\.)*"|true|false|null/g;
  const plain = (found) => JSON.stringify(JSON.parse(found)); // "\u004eaN" is "NaN"
  return text.replace(token, (found) => WORDS[plain(found)] ?? plain(found));
}

/** The text of an attribute as Python: a number, the list of a text with commas, or a string. */
function pythonOfAttribute(text, type) {
  if (type.startsWith("list[")) {
    return `[${listed(text).map((each) => pythonOfAttribute(each, type.slice("list[".length))).join(", ")}]`;
  }
  if (!/^(int\b|float\b|-?\d)/.test(type)) return JSON.stringify(text);
  if (/^[+-]?\d+$/.test(text)) return text.replace(/^([+-]?)0+(?=\d)/, "$1"); // digits beyond 2^53 stay
  return Number.isFinite(Number(text)) ? String(Number(text)) : JSON.stringify(text);
}

/** The parts of a text between commas. */
function listed(text) {
  return text.split(",").map((each) => each.trim()).filter(Boolean);
}

/** The text as one word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
