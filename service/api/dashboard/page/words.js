// The words of the page. They are those of `gradserve-client buffers`, so that people read the same in both.

/** Missing contributors that a table names: more names would leave no room for the buffer's. */
const MOST_NAMED = 3;

/** Return a number with `digits` significant digits as Python's format "g" writes it. */
export function general(number, digits = 6) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : "infinite";
  const [mantissa, power] = number.toExponential(digits - 1).split("e");
  const exponent = Number(power);
  if (exponent >= -4 && exponent < digits) return trimmed(number.toFixed(digits - 1 - exponent));
  const size = String(Math.abs(exponent)).padStart(2, "0");
  return `${trimmed(mantissa)}e${exponent < 0 ? "-" : "+"}${size}`;
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Return a shape: [30000, 256]. */
export function shape(dims) {
  return `[${dims.join(", ")}]`;
}

/** Return the number of gradients, with the quorum: 3 of 8. */
export function count(info) {
  return info.quorum === null ? String(info.count) : `${info.count} of ${info.quorum}`;
}

/** Return the weight, with the quorum of weight: 32 of 64. */
export function weight(info) {
  return general(info.weight) + (info.quorum_weight === null ? "" : ` of ${general(info.quorum_weight)}`);
}

/** Return who is missing, at most three by name: rank2, rank5 and rank7. */
export function missing(names) {
  const more = names.length > MOST_NAMED ? [`${names.length - MOST_NAMED} more`] : [];
  const all = [...names.slice(0, MOST_NAMED), ...more];
  return [all.slice(0, -1).join(", "), ...all.slice(-1)].filter(Boolean).join(" and ");
}

/** Return for whom or what a step waits, and how long it has not moved: waiting for rank2 for 40 s. */
export function waiting(info, seconds) {
  const lacking = info.quorum === null ? "more weight" : `${info.quorum - info.count} of ${info.quorum}`;
  return `waiting for ${info.missing?.length ? missing(info.missing) : lacking} for ${span(seconds)}`;
}

/** Return the contributors, with the number of their gradients if that is not 1. */
export function contributors(counts) {
  return (
    Object.entries(counts)
      .map(([name, count]) => (count === 1 ? name : `${name} (${count})`))
      .join(", ") || "none"
  );
}

/** Return a number of bytes: 30.7 MB. */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let amount = bytes;
  for (const unit of units) {
    if (amount < 999.5) return `${general(amount, 3)} ${unit}`;
    amount /= 1000;
  }
  return `${general(amount, 3)} TB`;
}

/** Return a time in the reader's time zone: 2026-07-01 12:00:00+02:00. */
export function time(seconds) {
  const at = new Date(Math.round(seconds * 1000));
  return at.toLocaleString("sv") + zone(at); // Swedes write the year first, and 24 hours
}

/** Return the offset of the reader's time zone at a time: +02:00. */
export function zone(at = new Date()) {
  const east = -at.getTimezoneOffset();
  const two = (number) => String(Math.trunc(Math.abs(number))).padStart(2, "0");
  return `${east < 0 ? "-" : "+"}${two(east / 60)}:${two(east % 60)}`;
}

/** Return the end of the deadline, and its rule: 30 s after the first gradient, if 2 are in. */
export function deadline(info) {
  if (info.deadline_seconds === null) return "none";
  const rule = `${general(info.deadline_seconds)} s after the first gradient, if ${info.min_count} are in`;
  return info.deadline_at === null ? rule : `${time(info.deadline_at)}, ${rule}`;
}

/** Return a length of time in its largest unit: 12 s, 3 min, 5 h, 2 d. */
export function span(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

/** Return how long ago or ahead a time is: in 12 s, 3 min ago. */
export function distance(at, now) {
  return at > now ? `in ${span(Math.ceil(at - now))}` : `${span(now - at)} ago`;
}

/** Return a share of a whole: 0, 12%, <0.1%. */
export function share(part, whole) {
  if (part === 0) return "0";
  const percent = (100 * part) / whole;
  return percent < 0.1 ? "<0.1%" : `${general(percent, percent < 10 ? 2 : 3)}%`;
}

/** Return a number with its noun: 1 buffer, 3 buffers. */
export function many(number, noun, nouns = `${noun}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;
}

function most(count) {
  return count >= 1e9 ? "any number" : `up to ${count}`; // a buffer takes no larger number
}

/** Return the fields of a buffer's metadata as pairs of a name and a text. */
export function fields(info) {
  return [
    ["name", info.name],
    ["shape", shape(info.shape)],
    ["dtype", info.dtype],
    ["size", size(info.bytes)],
    ["step", String(info.step)],
    ["count", count(info)],
    ["weight", weight(info)],
    ["contributors", `${contributors(info.contributors_in)}; ${most(info.per_contributor)} of each`],
    ["missing", info.missing === null ? "not known" : info.missing.join(", ") || "nobody"],
    ["deadline", deadline(info)],
    ["version", String(info.version)],
    ["nonfinite", info.nonfinite],
    ["max norm", info.max_norm === null ? "none" : general(info.max_norm)],
    ["keep", String(info.keep)],
    ["closed steps", info.closed_steps.join(", ") || "none"],
    ["created", time(info.created_at)],
    ["updated", time(info.updated_at)],
    ["expires", info.expires_at === null ? "never" : time(info.expires_at)],
  ];
}

/** Return the number of a graph's nodes. */
export function nodes({ nodes }) {
  return Object.values(nodes).reduce((all, count) => all + count, 0);
}
