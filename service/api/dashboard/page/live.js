// The samples of the last hour: first all of them, then the new ones.

import { repeat } from "./repeat.js";

/** Samples that the page keeps: an hour in steps of two seconds. */
const MOST_SAMPLES = 1800;

/** A later sample than this many steps after the last one leaves a gap. */
const GAP_STEPS = 1.6;

/** Seconds between samples, as the history says. */
export let step = 2;

/**
 * Keep `samples`, a list, up to date until the signal aborts, and call `changed(error)` after each request, with null
 * if it was answered. A hidden tab asks nothing: the next answer brings what it missed.
 */
export function follow(samples, { api, signal, changed }) {
  async function read() {
    const history = await api.get(`v1/service/history?since=${samples.at(-1)?.at ?? 0}`, { signal });
    step = history.step_seconds;
    samples.push(...history.samples);
    samples.splice(0, samples.length - MOST_SAMPLES);
    changed(null);
  }
  return repeat(signal, step, read, changed);
}

/** Return the samples since a time, with null wherever the server was away, so that no line spans that time. */
export function withGaps(samples, since) {
  const shown = samples.filter((each) => each.at >= since);
  return shown.flatMap((each, place) => {
    const before = shown[place - 1];
    const row = { at: each.at, sample: each };
    if (!before || each.at - before.at <= 2 * GAP_STEPS * step) return [row];
    return [{ at: before.at + step, sample: null }, row];
  });
}
