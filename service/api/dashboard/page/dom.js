// Builders of elements. Text from the server becomes text nodes only, so it is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element with these properties and children. Keys with "on" are listeners; true and false set or omit. */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Return an SVG element. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value") element.value = value;
    else if (name === "style") Object.entries(value).forEach(([key, each]) => element.style.setProperty(key, each));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return put(element, children);
}

/** Replace the children of an element. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => ![null, undefined, false].includes(child)));
  return element;
}

/** Return a button that sends no form. */
export function button(text, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, text);
}

/** Set the text of an element, if it differs: an unchanged text keeps a selection in it. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

/** Set or remove an attribute, if it differs. */
export function mark(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Return what a view shows in place of what is not there: a title, and paragraphs. */
export function empty(title, ...paragraphs) {
  const shown = paragraphs.map((each) => h("p", {}, each));
  return h("section", { class: "empty", role: "alert" }, h("h1", {}, title), shown);
}

/** Return a table. A head is a text, or a cell. */
export function table(kind, heads, rows) {
  const cells = heads.map((each) => (each instanceof Node ? each : h("th", { scope: "col" }, each)));
  return h("table", { class: kind }, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, rows));
}

/** Return a plain table. A column is [title, class of its cells]; a row is a list of texts or elements. */
export function listing(columns, rows) {
  const heads = columns.map(([title, kind]) => (title ? h("th", { scope: "col", class: kind }, title) : h("td")));
  const cells = (row) => row.map((each, place) => h("td", { class: columns[place][1] }, each));
  return table("plain", heads, rows.map((row) => h("tr", {}, cells(row))));
}

/** Return a named box that scrolls, also by keys. */
export function scroller(label, kind, ...children) {
  return h("div", { class: `scroll ${kind}`, tabindex: "0", role: "group", "aria-label": label }, children);
}

/** Return the nodes of a text with `code` in backticks, as the server's descriptions have it. */
export function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** Return what stands in place of a view that failed: the error's title and detail, which names a missing scope. */
export function failure(error) {
  const title = error.title ?? "The page failed";
  return h("section", { class: "empty", role: "alert" }, h("h1", {}, title), h("p", {}, error.message));
}

/** Hide the rows, as {element, words}, that lack a word of the text. Return how many stay. */
export function find(rows, text) {
  const parts = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const each of rows) each.element.hidden = !parts.every((word) => each.words.includes(word));
  return rows.filter(({ element }) => !element.hidden).length;
}
