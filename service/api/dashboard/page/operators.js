// All operators, as a list; with a name in the address, one of them.

import { h, prose, put, say } from "./dom.js";

export async function show(main, { api, caller, signal, parameters }) {
  const { operators } = await api.get("v1/ops", { signal });
  if (parameters.name === null) return showAll(main, operators);
  const operator = operators.find((each) => each.name === parameters.name);
  const { show: showOne } = await import("./operator.js");
  return showOne(main, { api, signal, operators, operator, name: parameters.name, keys: caller.keys });
}

function showAll(main, operators) {
  const rows = operators.map((each) => [row(each), searched(each)]);
  const none = h("p", { class: "muted", hidden: true }, "No operator has these letters in its name or formula.");
  const count = h("span", { class: "muted", role: "status" }, counted(operators.length));
  const search = h("input", {
    type: "search",
    placeholder: "Search",
    "aria-label": "Search operators",
    oninput() {
      const text = search.value.trim().toLowerCase();
      for (const [element, words] of rows) element.hidden = !words.includes(text);
      const shown = rows.filter(([element]) => !element.hidden).length;
      none.hidden = shown > 0;
      say(count, counted(shown));
    },
  });
  put(
    main,
    h("div", { class: "line top" }, h("h1", {}, "Operators"), count, search),
    h("ul", { class: "catalogue panel" }, rows.map(([element]) => element)),
    none,
  );
}

function counted(number) {
  return number === 1 ? "1 operator" : `${number} operators`;
}

function searched({ name, formula, inputs, outputs }) {
  return [name, formula, ...[...inputs, ...outputs].map((each) => each.name)].join(" ").toLowerCase();
}

function row(operator) {
  return h(
    "li",
    {},
    h("a", { href: `#/operators/${encodeURIComponent(operator.name)}` }, operator.name),
    h("p", { class: "formula" }, prose(operator.formula.replace(/\.$/, ""))),
    h("p", { class: "muted signature mono" }, signature(operator)),
  );
}

/** Return "dY, X → dX", with "?" after optional inputs and the attributes' defaults. */
function signature({ inputs, outputs, attributes }) {
  const takes = inputs.map((each) => each.name + (each.optional ? "?" : ""));
  const options = attributes.map((each) => (each.default === null ? each.name : `${each.name} = ${each.default}`));
  const gives = outputs.map((each) => each.name).join(", ");
  return `${takes.join(", ")} → ${gives}${options.length ? `; ${options.join(", ")}` : ""}`;
}
