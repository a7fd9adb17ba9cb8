// The progress of a running epoch, and whether the epoch is late.

import { h, mark } from "./dom.js";

/** The share of a deadline that is left when those who are missing count as late. */
const LATE_SHARE = 0.25;

/** Return how much of an epoch is in, from 0 to 1, or null if the buffer has no quorum. */
export function progress(info) {
  const shares = [[info.count, info.quorum], [info.weight, info.quorum_weight]];
  const known = shares.filter(([, whole]) => whole !== null).map(([part, whole]) => part / whole);
  return known.length ? Math.min(Math.max(...known, 0), 1) : null;
}

/** Return whether the deadline of the epoch has passed or nearly has, at the server's time `now`. */
export function isLate(info, now) {
  return info.deadline_at !== null && info.deadline_at - now < LATE_SHARE * info.deadline_seconds;
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
