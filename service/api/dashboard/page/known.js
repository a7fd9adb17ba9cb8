// The statistics that the page knows of buffers: of the last closed step, or of the sum where no step has closed.

import { path } from "./actions.js";

/** Names in one request: the server computes for a bounded number of bytes, the rest with the next request. */
const MAX_NAMES = 1000;

/** Closed steps of a buffer whose numbers are remembered. */
const MAX_STEPS = 200;

/** A buffer that is created again, or is in another namespace, is another one. */
const keyOf = ({ name, created_at: at }) => `${at}/${name}`;

class Known {
  statistics = new Map();
  steps = new Map();
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
   * Return the closed steps that the page has seen of all these buffers: {step, norm, loss}. `norm` is of their mean
   * gradients together; `loss` is the mean value of the first buffer. At most the last `most` are returned.
   */
  curve(infos, most = MAX_STEPS) {
    const [first, ...others] = infos.map((info) => this.steps.get(keyOf(info)) ?? new Map());
    const whole = [...(first ?? [])].filter(([step]) => others.every((each) => each.has(step)));
    const norm = (step) => Math.hypot(...[first, ...others].map((each) => each.get(step).norm));
    const last = whole.sort(([a], [b]) => a - b).slice(-most);
    return last.map(([step, { mean }]) => ({ step, norm: norm(step), loss: mean }));
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

  /** Read all closed steps that a buffer keeps. */
  async readSteps(info, { api, signal }) {
    const { steps } = await api.get(path(info.name, "/statistics"), { signal });
    steps.forEach((each) => this.remember(info, each));
  }

  isOld(info) {
    const { step, version, closed_steps: closed } = info;
    const known = this.statistics.get(keyOf(info));
    if (!known) return true;
    return closed.length ? known.step < closed.at(-1) : known.step !== step || known.version !== version;
  }

  /** Keep the statistics. The server may answer those of an earlier state again, which are no news. */
  learn(info, statistics) {
    const known = this.statistics.get(keyOf(info));
    if (known && known.step === statistics.step && known.version === statistics.version) return false;
    this.statistics.set(keyOf(info), statistics);
    if (info.closed_steps.length) this.remember(info, statistics); // perhaps of a later step than the list said
    return true;
  }

  remember(info, { step, norm, mean, weight }) {
    const steps = this.steps.get(keyOf(info)) ?? new Map();
    const part = (number) => (number === null || weight === 0 ? null : number / weight);
    if (norm !== null) this.steps.set(keyOf(info), steps.set(step, { norm: part(norm), mean: part(mean) }));
    if (steps.size > MAX_STEPS) steps.delete(Math.min(...steps.keys()));
  }

  /** Forget the buffers that are gone. */
  keep(infos) {
    const keys = new Set(infos.map(keyOf));
    for (const map of [this.statistics, this.steps, this.asked])
      for (const key of map.keys()) if (!keys.has(key)) map.delete(key);
  }
}

/** What the page knows, in all its views. */
export const known = new Known();

/** Return the share of elements that are not finite, or null. */
export function nonfinite(known) {
  return known ? (known.nan + known.infinite) / Math.max(known.size, 1) : null;
}
