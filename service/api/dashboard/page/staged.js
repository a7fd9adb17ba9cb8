// The pushes in parts that are not complete.

import { h, listing, put, say, scroller } from "./dom.js";
import * as words from "./words.js";

const NUMBERS = ["parts", "buffers", "size", "weight", "step"].map((title) => [title, "number"]);

const COLUMNS = [["push", "long"], ...NUMBERS, ["contributor"], ["expires"], ["refused"]];

/** A line that says what is staged, and opens a table of it. It is hidden while nothing is. */
export class Staged {
  constructor() {
    this.line = h("summary");
    this.rows = h("div");
    this.element = h("details", { class: "staged", hidden: true }, this.line, this.rows);
  }

  async read(api, signal) {
    const { pushes } = await api.get("v1/pushes?limit=1000", { signal });
    this.element.hidden = pushes.length === 0;
    const bytes = words.size(pushes.reduce((all, push) => all + push.bytes, 0));
    say(this.line, `Staged: ${words.many(pushes.length, "push", "pushes")} in parts, ${bytes}`);
    const text = JSON.stringify(pushes);
    if (text === this.shown) return;
    this.shown = text;
    put(this.rows, scroller("Staged pushes", "", listing(COLUMNS, pushes.map(textsOf))));
  }
}

function textsOf(push) {
  return [
    push.push,
    `${push.staged.length} of ${push.parts}`,
    push.count,
    words.size(push.bytes),
    words.general(push.weight),
    push.step,
    push.contributor,
    words.time(push.expires_at),
    push.refused,
  ];
}
