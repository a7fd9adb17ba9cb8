// The runs among the buffers: which buffers belong to one, and how it goes.

import { path } from "./actions.js";
import { isLate, isWaiting, progress, stillFor } from "./progress.js";
import { count, many, missing, span, waiting } from "./words.js";

/** Seconds without a change after which a run is over, or given up. */
const OVER_SECONDS = 600;

/** Seconds that a step may wait until nobody is expected to mend it. */
const GIVEN_UP_SECONDS = 3600;

/** Seconds without an add until the page says how long it is. */
const QUIET_SECONDS = 10;

/** What follows :: in a piece of a tensor, in a tally, and in a name that was too long. */
const WITHIN = /^(tally|\d+|[0-9a-f]{32})(::|$)/;

/** Return whether the name is of a run's own bookkeeping: exp1.::start, exp1.layer::tally. */
export const isOwn = (name) => /(^|\.|::)::|::tally$/.test(name);

/**
 * Return the prefix of each buffer's run, by names: what `::` separates, or else the first part. Where a run has
 * bookkeeping, as exp.1.::start, its prefix may have dots.
 */
export function prefixes(names) {
  const roots = new Set(names.flatMap((name) => /^(.+\.)::/.exec(name)?.[1] ?? []));
  return new Map(names.map((name) => [name, prefixOf(name, roots)]));
}

function prefixOf(name, roots) {
  for (let dot = name.lastIndexOf("."); dot > 0; dot = name.lastIndexOf(".", dot - 1))
    if (roots.has(name.slice(0, dot + 1))) return name.slice(0, dot + 1);
  const at = name.indexOf("::");
  if (at > 0 && name[at - 1] !== "." && !WITHIN.test(name.slice(at + 2))) return name.slice(0, at + 2);
  const dot = name.indexOf(".");
  return dot > 0 ? name.slice(0, dot + 1) : name;
}

/** Return the runs of these buffers. Buffers of bookkeeping alone are none. */
export function runsOf(infos) {
  const [found, groups] = [prefixes(infos.map(({ name }) => name)), new Map()];
  for (const info of infos) {
    const prefix = found.get(info.name);
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push(info);
  }
  return [...groups].map(([prefix, some]) => runOf(prefix, some)).filter(({ infos }) => infos.length);
}

/**
 * Return a run: its `infos` without bookkeeping; its `gradients`, its `losses`, and, if a graph is trained, its
 * `parameters`; and `behind`, the gradient whose step lacks most, as losses may come more rarely.
 */
function runOf(prefix, all) {
  const infos = all.filter(({ name }) => !isOwn(name));
  const begins = (letter) => infos.filter(({ name }) => name.startsWith(`${prefix}${letter}.`));
  const [parameters, taught] = [begins("p"), begins("g")];
  const isGraph = parameters.length > 0 && taught.length > 0;
  const summed = infos.filter((info) => hasSteps(info));
  const losses = summed.filter((info) => isLoss(info));
  const lacks = (a, b) => a.step - b.step || (progress(a) ?? 0) - (progress(b) ?? 0) || a.updated_at - b.updated_at;
  const gradients = isGraph ? taught : summed.filter((info) => !losses.includes(info));
  const [behind] = [gradients, losses, infos].find((some) => some.length)?.toSorted(lacks) ?? [];
  return {
    name: prefix.replace(/(\.|::)$/, ""),
    prefix,
    infos,
    behind,
    losses,
    gradients,
    parameters: isGraph ? parameters : [],
    first: all.find(({ name }) => name === `${prefix}::first`),
    moved: infos.reduce((last, info) => Math.max(last, info.updated_at), 0),
    bytes: infos.reduce((sum, info) => sum + info.bytes, 0),
  };
}

function hasSteps(info) {
  return info.step > 0 || [info.quorum, info.quorum_weight, info.deadline_seconds].some((rule) => rule !== null);
}

function isLoss({ name, shape }) {
  return /loss$/i.test(name) && shape.every((length) => length === 1);
}

/** The numbers of steps of runs that train a graph: those of an earlier run are in a buffer of their own. */
export class Steps {
  constructor(api, signal) {
    Object.assign(this, { api, signal, before: new Map() });
  }

  async read(runs) {
    for (const { first } of runs) {
      if (!first || this.before.has(stateOfBuffer(first))) continue;
      const { value } = await this.api.get(path(first.name, "/value?encoding=list"), { signal: this.signal });
      this.before.set(stateOfBuffer(first), Number(value.data));
    }
  }

  /** Return how often a run has written all its parameters; null for runs without parameters. */
  of({ parameters, first }) {
    if (!parameters.length) return null;
    const before = first ? this.before.get(stateOfBuffer(first)) ?? 0 : 0;
    return before + Math.max(Math.min(...parameters.map(({ version }) => version)) - 1, 0);
  }
}

const stateOfBuffer = ({ name, created_at: at, version }) => `${name}/${at}/${version}`;

/**
 * Return the workers of a run: {name, kind, since}. `kind` is "in", "soon" while the step still moves, "out", or, if
 * somebody should look, "out slow". `since` is for how many seconds a worker that is out has not been seen. A worker
 * that `isGone` was not in the last closed step either.
 */
export function workersOf({ behind }, now) {
  const [still, isSlow] = [stillFor(behind, now), isWaiting(behind, now) || isLate(behind, now)];
  const there = Object.entries(behind.contributors_in).map(([name, adds]) => ({ name, kind: "in", since: null, adds }));
  const missing = (behind.missing ?? []).map((name) => {
    const seen = behind.missing_since?.[name] ?? behind.updated_at;
    const isGone = behind.closed_at !== null && seen < behind.closed_at;
    const kind = isGone || isSlow ? "out slow" : still === null ? "soon" : "out";
    return { name, kind, since: kind === "soon" ? null : Math.max(now - seen, 0), isGone };
  });
  return [...missing, ...there];
}

/**
 * Return how a run goes at the server's time `now`: {kind, text, only, isActive}. `kind` is "bad", "late", "on",
 * "still" or "over"; `only` names the buffers that a link shows. `ill` is how many have values that are not finite.
 */
export function stateOf(run, ill, now) {
  const stuck = run.infos.filter((info) => isWaiting(info, now)).sort((a, b) => a.updated_at - b.updated_at);
  const rest = Math.max(now - run.moved, 0);
  const isActive = rest < (stuck.length ? GIVEN_UP_SECONDS : OVER_SECONDS);
  const state = (kind, text, only = null) => ({ kind, text, only, isActive });
  if (ill) return state("bad", `${many(ill, "buffer")} with non-finite values`, "nonfinite");
  const stop = stuck.length ? `stopped at ${count(stuck[0])}, ` : "";
  if (!isActive) return state("over", `${stop}idle for ${span(rest)}`);
  if (stuck.length) return state("late", waiting(stuck[0], now - stuck[0].updated_at), "waiting");
  const gone = workersOf(run, now).filter(({ isGone }) => isGone);
  const since = span(Math.max(...gone.map((each) => each.since)));
  if (gone.length) return state("late", `without ${missing(gone.map(({ name }) => name))} for ${since}`);
  const late = run.infos.find((info) => isLate(info, now));
  if (late) return state("late", `late${late.missing?.length ? `: ${missing(late.missing)}` : ""}`, "late");
  const still = stillFor(run.behind, now);
  if (still !== null) return state("still", waiting(run.behind, still));
  return rest < QUIET_SECONDS ? state("on", "running") : state("still", `no add for ${span(rest)}`);
}
