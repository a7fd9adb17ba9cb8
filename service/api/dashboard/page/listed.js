// The list of all buffers, read again and again, with the adds since the reading before.

import { failure, put } from "./dom.js";
import { repeat } from "./repeat.js";
import { runsOf } from "./training.js";

/** Seconds between two readings of the list, and of what is shown of the time. */
const [LIST_SECONDS, CLOCK_SECONDS] = [2, 1];

/** The buffers that the server has. */
export class Listed {
  constructor(api, signal) {
    Object.assign(this, { api, signal, infos: null, adds: new Map() });
  }

  async read() {
    const before = new Map((this.infos ?? []).map((info) => [info.name, info]));
    const [infos, at] = [await this.api.all("buffers", { signal: this.signal }), performance.now()];
    this.seconds = this.infos === null ? null : (at - this.at) / 1000;
    this.adds = new Map(infos.map((info) => [info.name, added(info, before.get(info.name))]));
    [this.infos, this.at] = [infos, at];
  }

  /** Read the buffers and the runs. Return the runs. */
  async readRuns() {
    const [described] = await Promise.all([this.api.all("runs", { signal: this.signal }), this.read()]);
    return runsOf(described, this.infos, this.api.now());
  }

  /** Return the adds to these buffers in a second, as `gradserve-client watch` counts them; null if not known yet. */
  rate(infos) {
    return this.seconds === null ? null : infos.reduce((sum, { name }) => sum + this.adds.get(name), 0) / this.seconds;
  }
}

function added(info, then) {
  if (!then || then.created_at !== info.created_at) return 0;
  const steps = info.quorum === null ? info.step - then.step : 0; // a take or a zero is no add
  return Math.max(info.version - then.version - steps, 0);
}

/** Let a view {main, listed, read, tick} read now and then, and tick each second, until the signal aborts. */
export async function follow(view, signal) {
  const clock = setInterval(
    () => document.visibilityState === "visible" && view.listed.infos && view.tick(),
    CLOCK_SECONDS * 1000,
  );
  signal.addEventListener("abort", () => clearInterval(clock));
  await repeat(signal, LIST_SECONDS, () => view.read(), (error) => {
    if (error.status && error.status !== 401 && view.listed.infos === null) put(view.main, failure(error));
  });
}
