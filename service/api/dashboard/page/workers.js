// The workers of a step as chips, and the panel of a running step.

import { h, mark, put, say } from "./dom.js";
import { bar, isLate, isWaiting, progress, setBar } from "./progress.js";
import { workersOf } from "./training.js";
import { byName } from "./tree.js";
import { count, deadline, distance, span, weight } from "./words.js";

const OUT = { out: " is not in yet", "out slow": " is missing", "out slow left": "" };
const SAID = { in: " is in", soon: " is expected", done: " has left", ...OUT };

/** Return a list that `setChips` fills. */
export const chips = () => h("ul", { class: "people" });

/** Show these workers, at most `most`: first those that lack. Chips stay the same elements as long as they can. */
export function setChips(list, workers, most = Infinity) {
  const sorted = workers.toSorted((a, b) => (b.since !== null) - (a.since !== null) || byName(a.name, b.name));
  const shown = sorted.slice(0, sorted.length > most ? most - 1 : most);
  const more = sorted.length - shown.length;
  const wanted = shown.length + (more > 0);
  if (list.children.length !== wanted) put(list, Array.from({ length: wanted }, () => h("li")));
  shown.forEach(({ name, kind, since, adds }, place) => {
    const chip = list.children[place];
    const left = kind.endsWith("left") ? " left out" : "";
    const text = (adds > 1 ? `${name} (${adds})` : name) + left + (since === null ? "" : ` ${span(since)}`);
    const said = `${SAID[kind]}${since === null ? "" : ", since that time"}`;
    if (chip.textContent !== text + said) put(chip, text, h("span", { class: "unseen" }, said));
    mark(chip, "class", kind);
  });
  if (more) mark(say(list.lastChild, `${more} more`), "class", null);
}

/** The panel of a running step: its numbers by their `names`, how much is in, and who. */
export class Running {
  constructor(title, names) {
    this.values = Object.fromEntries(names.map((name) => [name, h("dd")]));
    const tiles = names.map((name) => h("div", {}, h("dt", {}, name), this.values[name]));
    [this.title, this.track, this.people] = [h("h2", {}, title), bar(), chips()];
    const list = h("dl", { class: "tiles" }, tiles);
    this.element = h("section", { class: "panel running" }, this.title, list, this.track, this.people);
  }

  /** Show the step of a buffer, or of a run that may be over, at the server's time `now`, with `more` texts by name. */
  draw(info, now, { isOver = false, ...more } = {}) {
    const texts = {
      count: count(info),
      weight: weight(info),
      deadline: info.deadline_at === null ? "none" : distance(info.deadline_at, now),
      updated: distance(Math.min(info.updated_at, now), now),
      ...more,
    };
    Object.entries(this.values).forEach(([name, value]) => say(value, texts[name]));
    for (const name of ["count", "weight", "deadline"]) this.values[name].parentElement.hidden = isOver;
    this.values.deadline.title = deadline(info);
    this.values.deadline.classList.toggle("late", isLate(info, now));
    setBar(this.track, isOver ? null : progress(info), isLate(info, now) || isWaiting(info, now));
    setChips(this.people, workersOf(info, now));
  }
}
