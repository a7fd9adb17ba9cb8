// The statistics that the page knows of buffers: of the last closed epoch, or of the sum where no epoch has closed.

import { path } from "./actions.js";

/** Names in one request: the server computes for a bounded number of bytes, the rest with the next request. */
const MAX_NAMES = 1000;

/** Closed epochs of a buffer whose numbers are remembered. */
const MAX_EPOCHS = 200;

/** A buffer that is created again, or is in another namespace, is another one. */
const keyOf = ({ name, created_at: at }) => `${at}/${name}`;

class Known {
  statistics = new Map();
  epochs = new Map();
  asked = new Map();
  busy = false;

  /** Return the statistics of these buffers together, or null if some are not known. */
  of(infos) {
    const each = infos.map((info) => this.statistics.get(keyOf(info)));
    if (!each.every(Boolean)) return null;
    const sum = (name) => each.reduce((all, one) => all + one[name], 0);
    const norm = Math.sqrt(each.reduce((all, one) => all + (one.norm ?? 0) ** 2, 0));
    return { norm, nan: sum("nan"), infinite: sum("infinite"), size: sum("size") };
  }

  /** Return the buffers that are known to have values that are not finite. */
  ill(infos) {
    return infos.filter((info) => (nonfinite(this.statistics.get(keyOf(info))) ?? 0) > 0);
  }

  /**
   * Return the closed epochs that the page has seen of all these buffers: {epoch, norm, loss}. `norm` is of their mean
   * gradients together; `loss` is the mean value of the first buffer. At most the last `most` are returned.
   */
  curve(infos, most = MAX_EPOCHS) {
    const [first, ...others] = infos.map((info) => this.epochs.get(keyOf(info)) ?? new Map());
    const whole = [...(first ?? [])].filter(([epoch]) => others.every((each) => each.has(epoch)));
    const norm = (epoch) => Math.hypot(...[first, ...others].map((each) => each.get(epoch).norm));
    const last = whole.sort(([a], [b]) => a - b).slice(-most);
    return last.map(([epoch, { mean }]) => ({ epoch, norm: norm(epoch), loss: mean }));
  }

  /** Ask for the statistics of these buffers that have changed since. Return whether any came. */
  async ask(infos, { api, signal }) {
    const turn = (info) => this.asked.get(keyOf(info)) ?? 0;
    const old = infos.filter((info) => this.isOld(info)).sort((a, b) => turn(a) - turn(b)).slice(0, MAX_NAMES);
    if (!old.length || this.busy) return false;
    this.busy = true;
    try {
      const names = [...new Set(old.map(({ name }) => name))];
      const { statistics } = await api.post("v1/buffers/statistics?closed=true", { names }, { signal });
      old.forEach((info) => this.asked.set(keyOf(info), turn(info) + 1));
      return old.filter((info) => statistics[info.name] && this.learn(info, statistics[info.name])).length > 0;
    } finally {
      this.busy = false;
    }
  }

  /** Read all closed epochs that a buffer keeps. */
  async readEpochs(info, { api, signal }) {
    const { epochs } = await api.get(path(info.name, "/statistics"), { signal });
    epochs.forEach((each) => this.remember(info, each));
  }

  isOld(info) {
    const { epoch, version, closed_epochs: closed } = info;
    const known = this.statistics.get(keyOf(info));
    if (!known) return true;
    return closed.length ? known.epoch < closed.at(-1) : known.epoch !== epoch || known.version !== version;
  }

  /** Keep the statistics. The server may answer those of an earlier state again, which are no news. */
  learn(info, statistics) {
    const known = this.statistics.get(keyOf(info));
    if (known && known.epoch === statistics.epoch && known.version === statistics.version) return false;
    this.statistics.set(keyOf(info), statistics);
    if (info.closed_epochs.length) this.remember(info, statistics); // perhaps of a later epoch than the list said
    return true;
  }

  remember(info, { epoch, norm, mean, weight }) {
    const epochs = this.epochs.get(keyOf(info)) ?? new Map();
    const part = (number) => (number === null || weight === 0 ? null : number / weight);
    if (norm !== null) this.epochs.set(keyOf(info), epochs.set(epoch, { norm: part(norm), mean: part(mean) }));
    if (epochs.size > MAX_EPOCHS) epochs.delete(Math.min(...epochs.keys()));
  }

  /** Forget the buffers that are gone. */
  keep(infos) {
    const keys = new Set(infos.map(keyOf));
    for (const map of [this.statistics, this.epochs, this.asked])
      for (const key of map.keys()) if (!keys.has(key)) map.delete(key);
  }
}

/** What the page knows, in all its views. */
export const known = new Known();

/** Return the share of elements that are not finite, or null. */
export function nonfinite(known) {
  return known ? (known.nan + known.infinite) / Math.max(known.size, 1) : null;
}
