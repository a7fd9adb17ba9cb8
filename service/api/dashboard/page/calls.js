// One call of an operator, in three forms: what the page sends, curl, and Python.

import { listed, pythonOfAttribute, pythonOfJson, quoted } from "./literals.js";

/**
 * A call is {operator, tensors: [{name, text, dtype, usual}], attributes: [{name, type, text}]}. A tensor's `text` is
 * JSON; its `dtype` is null if the text says it, or if it is the `usual` one, which a list has without saying so.
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
  const options = call.attributes.map(({ name, type, text }) => `${name}=${pythonOfAttribute(text, type)}`);
  const outputs = call.operator.outputs.map((each) => each.name);
  const lines = [...inputs, ...options].map((each) => `        ${each},\n`).join("");
  const url = new URL(".", base).href.replace(/\/$/, "");
  const work = [
    `with Client(${JSON.stringify(url)}) as server:`,
    `    ${outputs.join(", ")} = server.ops.${methodOf(call.operator.name)}(`,
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

function pythonOfTensor({ text, dtype, usual }) {
  const value = JSON.parse(text);
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

/** Return the method of an operator: LogSoftmaxGrad_13 is log_softmax_grad_13. */
export function methodOf(name) {
  return name.replace(/([A-Z]+)([A-Z][a-z])|([a-z0-9])([A-Z])/g, "$1$3_$2$4").toLowerCase();
}
