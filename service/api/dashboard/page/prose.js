// Text with `code` in backticks, as the server's descriptions have it.

import { h } from "./dom.js";

/** Return the nodes of a text. */
export function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** Return a paragraph for each one of the text. */
export function paragraphs(text) {
  return text.split(/\n\n+/).filter(Boolean).map((each) => h("p", {}, prose(each.replaceAll("\n", " "))));
}
