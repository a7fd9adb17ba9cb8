// The samples of the last hour: first from the history, then each new one from the stream of events.

import { pause } from "./repeat.js";

/** Samples that the page keeps: an hour in steps of two seconds. */
const MOST_SAMPLES = 1800;

/** A later sample than this many steps after the last one leaves a gap, which the history may fill. */
const GAP_STEPS = 1.6;

/** A stream that is silent for this long is opened again: a laptop that slept has a dead connection. */
const SILENCE_MS = 15_000;

const [FIRST_WAIT_MS, MOST_WAIT_MS] = [1000, 15_000];

/**
 * Keep `samples`, a list, up to date until the signal aborts, and call `changed(state)` after each change; the state is
 * "live" or "waiting". A hidden tab reads nothing: the history brings what it missed.
 */
export async function follow(samples, { api, signal, changed }) {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    await visible(signal);
    const stream = opened(signal);
    try {
      await fill(samples, api, stream.signal);
      changed("live");
      for await (const event of api.events("v1/service/events", { signal: stream.signal })) {
        stream.heard();
        if (event.event !== "sample") continue;
        const sample = JSON.parse(event.data);
        if (isGap(samples, sample, step)) await fill(samples, api, stream.signal);
        add(samples, sample);
        wait = FIRST_WAIT_MS;
        changed("live");
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
    } finally {
      stream.close();
    }
    if (document.visibilityState !== "visible") continue;
    changed("waiting");
    await pause(signal, wait);
    wait = Math.min(wait * 2, MOST_WAIT_MS);
  }
}

/** Seconds between samples, as the history says. */
export let step = 2;

/** Return the signal of a stream, which also ends if the tab is hidden, or after a silence. */
function opened(signal) {
  const own = new AbortController();
  const hide = () => document.visibilityState === "visible" || own.abort();
  let timer = setTimeout(() => own.abort(), SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  return {
    signal: AbortSignal.any([signal, own.signal]),
    heard() {
      clearTimeout(timer);
      timer = setTimeout(() => own.abort(), SILENCE_MS);
    },
    close() {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", hide);
      own.abort();
    },
  };
}

async function visible(signal) {
  while (!signal.aborted && document.visibilityState !== "visible") await pause(signal, 3_600_000);
}

/** Put the server's history in place of what the page has, except for what is older than it. */
async function fill(samples, api, signal) {
  const history = await api.get("v1/service/history", { signal });
  step = history.step_seconds;
  const begin = history.samples[0]?.at ?? Infinity;
  const older = samples.filter((each) => each.at < begin);
  samples.splice(0, samples.length, ...[...older, ...history.samples].slice(-MOST_SAMPLES));
}

function isGap(samples, { at }, seconds) {
  return samples.length > 0 && at - samples.at(-1).at > GAP_STEPS * seconds;
}

function add(samples, sample) {
  if (samples.length > 0 && sample.at <= samples.at(-1).at) return;
  samples.push(sample);
  samples.splice(0, samples.length - MOST_SAMPLES);
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
