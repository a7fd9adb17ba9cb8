// The progress of a running step, and whether it waits or is late.

import { h, mark } from "./dom.js";

/** The share of a deadline that is left when those who are missing count as late. */
const LATE_SHARE = 0.25;

/** Seconds without a change after which a partly filled step waits, as in the client's log. */
export const WAITING_SECONDS = 30;

/** Seconds without a change after which the page says who is not in: in a quick run nobody could read it earlier. */
const STILL_SECONDS = 3;

/** Return how much of a step is in, from 0 to 1, or null if the buffer has no quorum. */
export function progress(info) {
  const shares = [[info.count, info.quorum], [info.weight, info.quorum_weight]];
  const known = shares.filter(([, whole]) => whole !== null).map(([part, whole]) => part / whole);
  return known.length ? Math.min(Math.max(...known, 0), 1) : null;
}

/** Return whether a buffer sums steps: whether any has closed, or a rule will close one. */
export function hasSteps(info) {
  return info.step > 0 || [info.quorum, info.quorum_weight, info.deadline_seconds].some((rule) => rule !== null);
}

/** Return whether a buffer has the losses of a run. */
export function isLoss({ name, shape }) {
  return /loss$/i.test(name) && shape.every((length) => length === 1);
}

/** Return whether the deadline of the step has passed or nearly has, at the server's time `now`. */
export function isLate(info, now) {
  return info.deadline_at !== null && info.deadline_at - now < LATE_SHARE * info.deadline_seconds;
}

/** Return for how many seconds a partly filled step has not moved, if that is worth a word; else null. */
export function stillFor(info, now) {
  const isPartly = info.count > 0 && ((progress(info) ?? 1) < 1 || info.missing?.length > 0);
  const seconds = now - info.updated_at;
  return isPartly && seconds >= STILL_SECONDS ? seconds : null;
}

/** Return whether a partly filled step has not moved for so long that somebody should look. */
export function isWaiting(info, now) {
  return (stillFor(info, now) ?? 0) >= WAITING_SECONDS;
}

/** Return a bar, which `setBar` fills. */
export function bar() {
  return h("span", { class: "track", "aria-hidden": "true" }, h("span"));
}

/** Fill a bar to a share from 0 to 1; null hides it. */
export function setBar(track, share, late) {
  track.hidden = share === null;
  track.classList.toggle("slow", late);
  const width = `${(100 * (share ?? 0)).toFixed(1)}%`;
  if (track.firstChild.style.width !== width) track.firstChild.style.width = width;
  mark(track, "data-share", share === null ? null : share.toFixed(3));
}
