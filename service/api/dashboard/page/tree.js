// Buffers as rows of a table, flat or as a tree by the dots in their names.

const collator = new Intl.Collator("en", { numeric: true });

export const byName = (a, b) => collator.compare(a, b);

/**
 * Return the rows to show. A row has `info`, or it is a group, with `members`, all buffers below it, and `total`, their
 * numbers together. `key(row)` is what rows are sorted by: null comes last. `isOpen(path)` says which groups show their
 * rows.
 */
export function rowsOf(infos, { tree, key, descending, isOpen }) {
  const order = ordering(key, descending);
  if (!tree) return infos.map((info) => leaf(info, info.name, 1)).sort(order);
  const rows = [];
  walk(grown(infos), 1, rows, { order, isOpen });
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
function grown(infos) {
  const root = node("");
  for (const info of infos) {
    const parts = info.name.split(".");
    let place = root;
    for (const part of parts.slice(0, -1)) {
      if (!place.groups.has(part)) place.groups.set(part, node(`${place.path}${part}.`));
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

function walk(place, level, rows, { order, isOpen }) {
  const below = [...place.groups.values()].map((group) => grouped(group, place.path, level));
  const leaves = place.leaves.map((info) => leaf(info, info.name.slice(place.path.length), level));
  const siblings = [...below, ...leaves].sort(order);
  siblings.forEach((row, index) => {
    [row.position, row.siblings] = [index + 1, siblings.length];
    rows.push(row);
    if (row.members === undefined) return;
    row.open = isOpen(row.name);
    if (row.open) walk(row.place, level + 1, rows, { order, isOpen });
  });
}

/** Return the row of a group. A group of one buffer is that buffer; a group of one group is that group. */
function grouped(place, above, level) {
  if (place.members.length === 1) return leaf(place.members[0], place.members[0].name.slice(above.length), level);
  while (place.groups.size === 1 && place.leaves.length === 0) [place] = place.groups.values();
  const name = place.path.slice(0, -1);
  const row = { id: `g:${name}`, name, label: name.slice(above.length), level, members: place.members, place };
  row.total = total(place.members);
  return row;
}

/** Return the numbers of buffers together, in the form of metadata. What differs among them is null. */
function total(infos) {
  const sum = (name) => infos.reduce((all, info) => all + info[name], 0);
  const sumIfAll = (name) => (infos.every((info) => info[name] !== null) ? sum(name) : null);
  const same = (name) => (infos.every((info) => info[name] === infos[0][name]) ? infos[0][name] : null);
  const least = (name) => infos.reduce((least, info) => Math.min(least, info[name]), Infinity);
  const most = (name) => infos.reduce((most, info) => Math.max(most, info[name]), -Infinity);
  const late = infos.filter((info) => info.deadline_at !== null);
  const first = late.reduce(
    (least, info) => (least === null || info.deadline_at < least.deadline_at ? info : least),
    null,
  );
  const lacking = infos.filter((info) => info.missing !== null);
  return {
    dtype: same("dtype"),
    count: sum("count"),
    quorum: sumIfAll("quorum"),
    weight: sum("weight"),
    quorum_weight: sumIfAll("quorum_weight"),
    epochs: [least("epoch"), most("epoch")],
    bytes: sum("bytes"),
    updated_at: most("updated_at"),
    deadline_at: first?.deadline_at ?? null,
    deadline_seconds: first?.deadline_seconds ?? null,
    missing: lacking.length ? [...new Set(lacking.flatMap((info) => info.missing))] : null,
  };
}
