// The statistics that the page knows of buffers: of the last closed step, or of the sum where no step has closed.

import { path } from "./actions.js";
import { hasSteps, isLoss } from "./progress.js";
import { general, many } from "./words.js";

/** Names in one request: the server computes for a bounded number of bytes, the rest with the next request. */
const MAX_NAMES = 1000;

/** Closed steps of a buffer whose numbers are remembered, at least: as many as it keeps, if they are more. */
const MIN_STEPS = 200;

/** A buffer that is created again, or is in another namespace, is another one. */
const keyOf = ({ name, created_at: at }) => `${at}/${name}`;

class Known {
  statistics = new Map();
  steps = new Map();
  asked = new Map();
  read = new Map();
  busy = false;

  /**
   * Return the statistics of these buffers together, or null if some are not known. `norm` is of the means: null for
   * losses, and for buffers of several kinds.
   */
  of(infos) {
    const each = infos.map((info) => this.statistics.get(keyOf(info)));
    if (!each.every(Boolean)) return null;
    const sum = (name) => each.reduce((all, one) => all + one[name], 0);
    const kinds = new Set(infos.map((info) => (isLoss(info) ? "loss" : hasSteps(info))));
    const norm = kinds.size > 1 || kinds.has("loss") ? null : Math.hypot(...each.map((one) => mean(one, "norm")));
    return { norm, nan: sum("nan"), infinite: sum("infinite"), size: sum("size") };
  }

  /** Return the buffers that are known to have values that are not finite. */
  ill(infos) {
    return infos.filter((info) => bad(this.statistics.get(keyOf(info)) ?? {}) !== null);
  }

  /** Return which of these buffers have what values that are not finite: NaN in loss; null if none are known. */
  illness({ infos, prefix }) {
    const ill = this.ill(infos);
    if (!ill.length) return null;
    const word = general(bad(this.of(ill)));
    return `${word} in ${ill.length > 1 ? many(ill.length, "buffer") : ill[0].name.slice(prefix.length) || ill[0].name}`;
  }

  /** Return the steps before the run, of a checkpoint that it began with. */
  begun({ begun }) {
    return (begun && this.statistics.get(keyOf(begun))?.mean) ?? 0;
  }

  /**
   * Return the closed steps that the page has seen of all these buffers: {step, norm, loss}. `norm` is of their mean
   * gradients together; `loss` is the mean value of the first buffer. At most the last `most` are returned.
   */
  curve(infos, most = Infinity) {
    const [first, ...others] = infos.map((info) => this.steps.get(keyOf(info)) ?? new Map());
    const whole = [...(first ?? [])].filter(([step]) => others.every((each) => each.has(step)));
    const norm = (step) => Math.hypot(...[first, ...others].map((each) => each.get(step).norm));
    const last = whole.sort(([a], [b]) => a - b).slice(-most);
    return last.map(([step, { loss }]) => ({ step, norm: norm(step), loss }));
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

  /** Read the closed steps that a buffer keeps: at most the last `most` at first, and later those that are new. */
  async readSteps(info, { api, signal }, most = info.keep) {
    const [last, seen] = [info.closed_steps.at(-1) ?? -1, this.read.get(keyOf(info)) ?? -1];
    if (last <= seen) return;
    const since = Math.max(seen + 1, info.closed_steps.at(-most) ?? 0);
    const { steps } = await api.get(path(info.name, `/statistics?since=${since}`), { signal });
    steps.forEach((each) => this.remember(info, each));
    this.read.set(keyOf(info), last);
  }

  isOld(info) {
    const { step, version, closed_steps: closed } = info;
    const known = this.statistics.get(keyOf(info));
    if (!known || (closed.length && !this.steps.has(keyOf(info)))) return true; // or it is of a running sum
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

  remember(info, statistics) {
    const steps = this.steps.get(keyOf(info)) ?? new Map();
    const { step, norm } = statistics;
    if (norm !== null || bad(statistics) !== null)
      steps.set(step, { norm: mean(statistics, "norm"), loss: mean(statistics, "mean") });
    this.steps.set(keyOf(info), steps);
    if (steps.size > Math.max(MIN_STEPS, info.keep)) steps.delete(Math.min(...steps.keys()));
  }

  /** Forget the buffers that are gone. */
  keep(infos) {
    const keys = new Set(infos.map(keyOf));
    for (const map of [this.statistics, this.steps, this.asked, this.read])
      for (const key of map.keys()) if (!keys.has(key)) map.delete(key);
  }
}

/** What the page knows, in all its views. */
export const known = new Known();

/** Return what stands for values that are not all finite: NaN or Infinity; else null. */
export function bad({ nan, infinite, nonfinite = infinite }) {
  return nan ? NaN : nonfinite ? Infinity : null;
}

/** Return a number of a weighted sum divided by the weight; null if there is none. */
function mean(statistics, name) {
  const [number, weight] = [statistics[name], statistics.weight];
  return bad(statistics) ?? (number === null || weight === 0 ? null : number / weight);
}
