// The closed steps that a buffer keeps, with their receipts.

import { download, path } from "./actions.js";
import { button, h, listing, put } from "./dom.js";
import { bad } from "./known.js";
import * as words from "./words.js";

/** Receipts that are read at once, and how many more a click reads. */
const [FIRST, MORE] = [10, 50];

const NUMBERS = ["step", "count", "weight", "norm"].map((title) => [title, "number"]);

const COLUMNS = [...NUMBERS, ["closed by"], ["contributors", "long"], [""]];

/** A table of closed steps in `host`, the newest first. */
export class Receipts {
  constructor(host, api, signal) {
    Object.assign(this, { host, api, signal });
    this.info = null;
    this.known = new Map();
    this.wanted = FIRST;
  }

  /**
   * Read the receipts that are missing, and show all. `steps` are statistics of closed steps, for their norms. They
   * are shown alone if all kept steps were replaced since the last reading: their receipts would be gone.
   */
  async show(info, steps) {
    const before = this.info;
    [this.info, this.steps] = [info, new Map(steps.map((each) => [each.step, each]))];
    if (!before || info.step - before.step > info.keep) {
      this.draw(steps.slice(-this.wanted).reverse());
      return;
    }
    const shown = [...info.closed_steps].sort((a, b) => b - a).slice(0, this.wanted);
    const known = this.known;
    this.known = new Map(shown.filter((step) => known.has(step)).map((step) => [step, known.get(step)]));
    for (const step of shown.filter((each) => !this.known.has(each))) await this.read(step);
    const receipts = shown.map((step) => this.known.get(step)).filter(Boolean);
    if (receipts.length || !shown.length) this.draw(receipts); // else newer steps have closed
  }

  async read(step) {
    try {
      this.known.set(step, await this.api.get(path(this.info.name, `?step=${step}`), { signal: this.signal }));
    } catch (error) {
      if (error.status !== 410) throw error; // no longer kept
    }
  }

  draw(receipts) {
    if (!receipts.length) {
      put(this.host, h("p", { class: "muted" }, "No closed step is kept."));
      this.drawn = null;
      return;
    }
    const drawn = JSON.stringify(receipts.map((each) => [each, this.steps.get(each.step)]));
    if (drawn === this.drawn) return; // a click is lost if its button is replaced meanwhile
    this.drawn = drawn;
    const rows = receipts.map((receipt) => this.cells(receipt));
    const focused = this.host.contains(document.activeElement) ? document.activeElement.dataset.step : undefined;
    put(this.host, listing(COLUMNS, rows), receipts.length === this.wanted && button("Show more", () => this.more()));
    if (focused !== undefined) this.host.querySelector(`[data-step="${CSS.escape(focused)}"]`)?.focus();
  }

  cells(receipt) {
    const known = this.steps.get(receipt.step) ?? {};
    const [ill, norm] = [bad(known), bad(known) ?? known.norm ?? null];
    const { step, count, weight, contributors } = receipt;
    const properties = { class: "quiet", "aria-label": `Download step ${step}`, "data-step": step };
    return [
      step,
      count,
      words.general(weight),
      norm !== null && h("span", { class: ill !== null && "bad" }, words.general(norm, 4)),
      receipt.closed_by,
      contributors && words.contributors(contributors),
      contributors && button("Download", () => download(this.api, { info: this.info }, step), properties),
    ];
  }

  more() {
    this.wanted += MORE;
    this.show(this.info, [...this.steps.values()]).catch(() => {}); // the next reading tries again
  }
}
