// Buffers as rows of a table, flat or as a tree by their runs and the dots in their names.

import { progress } from "./progress.js";
import { prefixOf } from "./training.js";

const collator = new Intl.Collator("en", { numeric: true });

export const byName = (a, b) => collator.compare(a, b);

/**
 * Return the rows to show. A row has `info`, or it is a group, with `members`, all buffers below it, and `total`, their
 * numbers together. `key(row)` is what rows are sorted by: null comes last. `isOpen(path)` says which groups show their
 * rows. Groups are runs, and then the parts of names between dots. All names begin with `prefix`, which no row repeats.
 *
 * `head` of a row is the group of its run; the columns in `head.same` are equal in all its rows.
 */
export function rowsOf(infos, { tree, prefix, key, descending, isOpen }) {
  const order = ordering(key, descending);
  if (!tree) return infos.map((info) => leaf(info, info.name.slice(prefix.length), 1)).sort(order);
  const rows = [];
  walk(grown(infos, prefix), 1, null, rows, { order, isOpen });
  return rows;
}

function leaf(info, label, level) {
  return { id: `b:${info.name}`, name: info.name, label, level, info };
}

function ordering(key, descending) {
  const sign = descending ? -1 : 1;
  const keys = new Map();
  const of = (row) => {
    if (!keys.has(row)) keys.set(row, key(row));
    return keys.get(row);
  };
  return (a, b) => {
    const [first, second] = [of(a), of(b)];
    const same = byName(a.name, b.name);
    if (first === null || second === null) return (first === null) - (second === null) || same;
    const compared = typeof first === "string" ? byName(first, second) : first - second;
    return sign * compared || same;
  };
}

/** Return the root of the tree: nodes have `groups` by the next part of the name, and `leaves`. */
function grown(infos, prefix) {
  const root = node(prefix);
  for (const info of infos) {
    const run = prefix === "" ? prefixOf(info) : prefix;
    const rest = info.name.slice(run.length).split(".");
    const within = rest.slice(0, -1).map((part) => `${part}.`);
    const parts = prefix === "" && run !== info.name ? [run, ...within] : within;
    let place = root;
    for (const part of parts) {
      if (!place.groups.has(part)) place.groups.set(part, node(`${place.path}${part}`));
      place = place.groups.get(part);
      place.members.push(info);
    }
    place.leaves.push(info);
  }
  return root;
}

function node(path) {
  return { path, groups: new Map(), leaves: [], members: [] };
}

function walk(place, level, head, rows, { order, isOpen }) {
  const below = [...place.groups.values()].map((group) => grouped(group, place.path, level));
  const leaves = place.leaves.map((info) => leaf(info, info.name.slice(place.path.length), level));
  const siblings = [...below, ...leaves].sort(order);
  siblings.forEach((row, index) => {
    [row.position, row.siblings, row.head] = [index + 1, siblings.length, head];
    rows.push(row);
    if (row.members === undefined) return;
    row.open = isOpen(row.name);
    if (row.open) walk(row.place, level + 1, head ?? row, rows, { order, isOpen });
  });
}

/** Return the row of a group. A group of one buffer is that buffer; a group of one group is that group. */
function grouped(place, above, level) {
  if (place.members.length === 1) return leaf(place.members[0], place.members[0].name.slice(above.length), level);
  while (place.groups.size === 1 && place.leaves.length === 0) [place] = place.groups.values();
  const name = place.path.replace(/(\.|::)$/, "");
  const { run } = place.members[0];
  const label = name.slice(above.length).replace(run?.replaceAll(".", ":2E") ?? "", run ?? ""); // dots, as people wrote
  const row = { id: `g:${name}`, name, label, level, members: place.members, place };
  row.total = total(place.members);
  row.same = sameIn(place.members);
  return row;
}

/** Return the columns that are equal for all these buffers, of those that a group can show. */
export function sameIn(infos) {
  const [first, every] = [infos[0], (test) => infos.every((info) => test(info))];
  const alike = (...names) => every((info) => names.every((name) => info[name] === first[name]));
  const missing = String(first.missing);
  const columns = {
    dtype: alike("dtype"),
    count: alike("count", "quorum", "quorum_weight", "weight"),
    missing: every((info) => String(info.missing) === missing),
    weight: alike("weight", "quorum_weight"),
    step: alike("step"),
    deadline: alike("deadline_at"),
    updated: every((info) => Math.abs(info.updated_at - first.updated_at) < 1),
  };
  return new Set(Object.keys(columns).filter((name) => columns[name]));
}

/** Return the numbers of buffers together, in the form of metadata: those of the one that lacks most, or of all. */
function total(infos) {
  const same = (name) => (infos.every((info) => info[name] === infos[0][name]) ? infos[0][name] : null);
  const lacks = (a, b) => a.step < b.step || (a.step === b.step && (progress(a) ?? 1) < (progress(b) ?? 1));
  const behind = infos.reduce((least, info) => (lacks(info, least) ? info : least));
  const steps = infos.map((info) => info.step);
  const due = infos.filter((info) => info.deadline_at !== null).sort((a, b) => a.deadline_at - b.deadline_at)[0];
  return {
    ...behind,
    behind,
    dtype: same("dtype"),
    weight: same("weight"),
    steps: [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))],
    bytes: infos.reduce((sum, info) => sum + info.bytes, 0),
    deadline_at: due?.deadline_at ?? null,
    deadline_seconds: due?.deadline_seconds ?? null,
    updated_at: infos.reduce((last, info) => Math.max(last, info.updated_at), 0),
  };
}
