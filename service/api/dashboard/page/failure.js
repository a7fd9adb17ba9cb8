// The description of an error, in place of a view or of a part of it.

import { Problem, Unreachable } from "./api.js";
import { h } from "./dom.js";

/** Return the description of an error: its title, and its detail, which names the scope that a key lacks. */
export function failure(error, tag = "h1") {
  const title = error instanceof Problem ? error.title : error instanceof Unreachable ? "No answer" : "The page failed";
  return h("section", { class: "empty", role: "alert" }, h(tag, {}, title), h("p", {}, error.message));
}
