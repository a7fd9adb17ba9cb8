// The closed epochs that a buffer keeps, with their receipts.

import { download, path } from "./actions.js";
import { h, put, table } from "./dom.js";
import * as words from "./words.js";

/** Receipts that are read at once, and how many more a click reads. */
const [FIRST, MORE] = [10, 50];

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
      return;
    }
    const titles = ["epoch", "count", "weight", "norm", "closed by", "contributors", ""];
    const head = (title, place) => h("th", { scope: "col", class: place < 4 ? "number" : null }, title);
    const heads = titles.map((title, place) => (title ? head(title, place) : h("td")));
    const rows = receipts.map((receipt) => this.row(receipt));
    const focused = this.host.contains(document.activeElement) ? document.activeElement.dataset.epoch : undefined;
    put(this.host, table("plain", heads, rows), receipts.length === this.wanted && this.button());
    if (focused !== undefined) this.host.querySelector(`[data-epoch="${CSS.escape(focused)}"]`)?.focus();
  }

  row(receipt) {
    const { norm = null, nonfinite = 0 } = this.epochs.get(receipt.epoch) ?? {};
    const save = h("button", {
      type: "button",
      class: "quiet",
      "aria-label": `Download epoch ${receipt.epoch}`,
      "data-epoch": receipt.epoch,
      onclick: () => download(this.api, { info: this.info }, receipt.epoch),
    });
    save.append("Download");
    const number = (text, ill = false) => h("td", { class: ill ? "number bad" : "number" }, text);
    return h(
      "tr",
      {},
      number(String(receipt.epoch)),
      number(String(receipt.count)),
      number(words.general(receipt.weight)),
      number(norm === null ? "" : words.general(norm, 4), nonfinite > 0),
      h("td", {}, receipt.closed_by),
      h("td", { class: "long" }, receipt.contributors ? words.contributors(receipt.contributors) : ""),
      h("td", {}, receipt.contributors && save),
    );
  }

  button() {
    const more = () => {
      this.wanted += MORE;
      this.show(this.info, [...this.epochs.values()]).catch(() => {}); // the next reading tries again
    };
    return h("button", { type: "button", onclick: more }, "Show more");
  }
}
