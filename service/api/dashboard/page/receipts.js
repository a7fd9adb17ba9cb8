// The closed epochs that a buffer keeps, with their receipts.

import { download, path } from "./actions.js";
import { button, h, listing, put } from "./dom.js";
import * as words from "./words.js";

/** Receipts that are read at once, and how many more a click reads. */
const [FIRST, MORE] = [10, 50];

const NUMBERS = ["epoch", "count", "weight", "norm"].map((title) => [title, "number"]);

const COLUMNS = [...NUMBERS, ["closed by"], ["contributors", "long"], [""]];

/** A table of closed epochs in `host`, the newest first. */
export class Receipts {
  constructor(host, api, signal) {
    Object.assign(this, { host, api, signal });
    this.info = null;
    this.known = new Map();
    this.wanted = FIRST;
  }

  /**
   * Read the receipts that are missing, and show all. `epochs` are statistics of closed epochs, for their norms. They
   * are shown alone if all kept epochs were replaced since the last reading: their receipts would be gone.
   */
  async show(info, epochs) {
    const before = this.info;
    [this.info, this.epochs] = [info, new Map(epochs.map((each) => [each.epoch, each]))];
    if (!before || info.epoch - before.epoch > info.keep) {
      this.draw(epochs.slice(-this.wanted).reverse());
      return;
    }
    const shown = [...info.closed_epochs].sort((a, b) => b - a).slice(0, this.wanted);
    const known = this.known;
    this.known = new Map(shown.filter((epoch) => known.has(epoch)).map((epoch) => [epoch, known.get(epoch)]));
    for (const epoch of shown.filter((each) => !this.known.has(each))) await this.read(epoch);
    const receipts = shown.map((epoch) => this.known.get(epoch)).filter(Boolean);
    if (receipts.length || !shown.length) this.draw(receipts); // else newer epochs have closed
  }

  async read(epoch) {
    try {
      this.known.set(epoch, await this.api.get(path(this.info.name, `?epoch=${epoch}`), { signal: this.signal }));
    } catch (error) {
      if (error.status !== 410) throw error; // no longer kept
    }
  }

  draw(receipts) {
    if (!receipts.length) {
      put(this.host, h("p", { class: "muted" }, "No closed epoch is kept."));
      this.drawn = null;
      return;
    }
    const drawn = JSON.stringify(receipts.map((each) => [each, this.epochs.get(each.epoch)]));
    if (drawn === this.drawn) return; // a click is lost if its button is replaced meanwhile
    this.drawn = drawn;
    const rows = receipts.map((receipt) => this.cells(receipt));
    const focused = this.host.contains(document.activeElement) ? document.activeElement.dataset.epoch : undefined;
    put(this.host, listing(COLUMNS, rows), receipts.length === this.wanted && button("Show more", () => this.more()));
    if (focused !== undefined) this.host.querySelector(`[data-epoch="${CSS.escape(focused)}"]`)?.focus();
  }

  cells(receipt) {
    const { norm = null, nonfinite = 0 } = this.epochs.get(receipt.epoch) ?? {};
    const { epoch, count, weight, contributors } = receipt;
    const properties = { class: "quiet", "aria-label": `Download epoch ${epoch}`, "data-epoch": epoch };
    return [
      epoch,
      count,
      words.general(weight),
      norm !== null && h("span", { class: nonfinite > 0 && "bad" }, words.general(norm, 4)),
      receipt.closed_by,
      contributors && words.contributors(contributors),
      contributors && button("Download", () => download(this.api, { info: this.info }, epoch), properties),
    ];
  }

  more() {
    this.wanted += MORE;
    this.show(this.info, [...this.epochs.values()]).catch(() => {}); // the next reading tries again
  }
}
