// All operators by family, the graphs, and what is not served; with a name in the address, one of them.

import { find, h, prose, put, say } from "./dom.js";
import { many, size } from "./words.js";

export async function show(main, { api, caller, signal, parameters }) {
  const { operators, not_served: others } = await api.get("v1/ops", { signal });
  const families = [...Map.groupBy(operators, (each) => each.family)].sort(([a], [b]) => a.localeCompare(b));
  if (parameters.name === null) return showAll(main, families, await api.all("graphs", { signal }), others);
  const operator = operators.find((each) => each.name === parameters.name);
  const { show: showOne } = await import("./operator.js");
  return showOne(main, { api, signal, families, operator, name: parameters.name, keys: caller.keys });
}

function showAll(main, families, graphs, others) {
  const groups = families.map(([family, operators]) => group("section", family, operators.map(rowOf)));
  const models = group("section", "Graphs", graphs.map(graphOf));
  const rest = group("details", "Not served", others.map(restOf));
  const none = h("p", { class: "muted" }, "No operator has these letters in its name, family or formula.");
  const count = h("span", { class: "muted", role: "status" });
  const words = { placeholder: "Search", "aria-label": "Search operators" };
  const search = h("input", { type: "search", oninput: look, ...words });
  function look() {
    const text = search.value;
    const shown = groups.reduce((all, each) => all + each.find(text), 0);
    say(count, many(shown, "operator"));
    none.hidden = rest.find(text) + models.find(text) + shown > 0;
    rest.element.open = text.trim() !== "";
  }
  look();
  put(
    main,
    h("div", { class: "line top" }, h("h1", {}, "Operators"), count, search),
    [...groups, models, rest].map((each) => each.element),
    none,
  );
}

/** Return rows under a title: {element, find}. `find(text)` hides the rows without it, and returns how many stay. */
function group(tag, title, rows) {
  const count = h("span", { class: "muted" });
  const head = h("h2", {}, title, count);
  const list = h("ul", { class: "catalogue" }, rows.map(({ element }) => element));
  const element = h(tag, { class: "panel family" }, tag === "details" ? h("summary", {}, head) : head, list);
  return {
    element,
    find(text) {
      const shown = find(rows, text);
      element.hidden = shown === 0;
      say(count, String(shown));
      return shown;
    },
  };
}

function rowOf(operator) {
  const { name, family, formula, inputs, outputs } = operator;
  const tensors = [...inputs, ...outputs].map((each) => each.name);
  const link = h("a", { href: `#/operators/${encodeURIComponent(name)}` }, name);
  const computed = h("p", { class: "formula" }, prose(formula.replace(/\.$/, "")));
  const element = h("li", {}, link, computed, h("p", { class: "muted signature mono" }, signature(operator)));
  return { words: [name, family, formula, ...tensors].join(" ").toLowerCase(), element };
}

function graphOf({ name, bytes }) {
  const link = h("a", { href: `#/graphs/${encodeURIComponent(name)}` }, name);
  return { words: name.toLowerCase(), element: h("li", {}, link, h("p", { class: "muted" }, size(bytes))) };
}

function restOf({ name, why }) {
  const element = h("li", {}, h("span", {}, name), h("p", { class: "muted" }, why));
  return { words: `${name} ${why}`.toLowerCase(), element };
}

/** Return "dY, X → dX", with "?" after optional inputs and the attributes' defaults. */
function signature({ inputs, outputs, attributes }) {
  const takes = inputs.map((each) => each.name + (each.optional ? "?" : ""));
  const options = attributes.map((each) => (each.default === null ? each.name : `${each.name} = ${each.default}`));
  const gives = outputs.map((each) => each.name).join(", ");
  return `${takes.join(", ")} → ${gives}${options.length ? `; ${options.join(", ")}` : ""}`;
}
