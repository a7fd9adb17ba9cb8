// The runs that the server has, with their buffers: who is in, who is awaited, and how each goes.

import { hasSteps, isLate, isLoss, isWaiting, progress, stillFor } from "./progress.js";
import { count, distance, missing, span, waiting } from "./words.js";

/** Seconds without an add after which buffers without a run are idle: the server counts as many for a run. */
const IDLE_SECONDS = 600;

/** Seconds without an add until the page says how long it is. */
const QUIET_SECONDS = 10;

/** What follows :: in a piece of a tensor, in a tally, and in a name that was too long. */
const WITHIN = /^(tally|\d+|[0-9a-f]{32})(::|$)/;

/** The rules of a run that has no buffers yet. */
const NO_RULES = { quorum: null, quorum_weight: null, deadline_at: null, deadline_seconds: null };

/** Return whether the name is of a run's own bookkeeping: exp1.::first, exp1.layer::tally. */
export const isOwn = (name) => /(^|\.|::)::|::tally$/.test(name);

/** Return what the name of a buffer has before its place in a run: what clients put there, or else its first part. */
export function prefixOf({ name, run }) {
  const own = [run, run?.replaceAll(".", ":2E")].find((each) => run && name.startsWith(`${each}.`));
  if (own) return `${own}.`;
  const at = name.indexOf("::");
  if (at > 0 && name[at - 1] !== "." && !WITHIN.test(name.slice(at + 2))) return name.slice(0, at + 2);
  const dot = name.indexOf(".");
  return dot > 0 ? name.slice(0, dot + 1) : name;
}

/** Return the runs as the server describes them, with their buffers; and buffers without a run that sum steps. */
export function runsOf(described, infos, now) {
  const members = Map.groupBy(infos, ({ run }) => run);
  const others = Map.groupBy(members.get(null) ?? [], prefixOf);
  const raw = [...others].filter(([, all]) => all.some(hasSteps));
  return [
    ...described.map((run) => runOf(run, members.get(run.name) ?? [])),
    ...raw.map(([prefix, all]) => runOf(undescribed(prefix, all, now), all)),
  ];
}

/** Return in the form of a run what is known of buffers without one: its step is the one that lacks most. */
function undescribed(prefix, all, now) {
  const share = (info) => progress(info) ?? 0; // losses may come more rarely
  const lacks = (a, b) => isLoss(a) - isLoss(b) || a.step - b.step || share(a) - share(b) || a.updated_at - b.updated_at;
  const [{ name: buffer, step, missing }] = all.filter(hasSteps).toSorted(lacks);
  const updated = Math.max(...all.map((info) => info.updated_at));
  const state = now - updated > IDLE_SECONDS ? "idle" : "running";
  const name = prefix.replace(/(\.|::)$/, "");
  return { name, life: prefix, prefix, buffer, state, step, missing, updated_at: updated, ended: null };
}

/**
 * Return a run: what the server says of it and of its running step, and its `infos` without bookkeeping. `gradients` are
 * those of a graph's parameters, or all sums but the `losses`; `begun` has the steps before the run.
 */
function runOf(run, all) {
  const infos = all.filter(({ name }) => !isOwn(name));
  const at = (place) => infos.filter((info) => hasSteps(info) && info.name.startsWith(`${run.prefix}${place}`));
  const isGraph = infos.some(({ name }) => name.startsWith(`${run.prefix}p.`)) && at("g.").length > 0;
  const lead = all.find(({ name }) => name === run.buffer);
  return {
    ...{ count: 0, weight: 0, contributors_in: {}, ...NO_RULES },
    ...lead,
    ...run,
    infos,
    lead,
    losses: at("").filter(isLoss),
    gradients: isGraph ? at("g.") : at("").filter((info) => !isLoss(info)),
    begun: all.find(({ name }) => name === `${run.prefix}::first`),
    bytes: infos.reduce((sum, info) => sum + info.bytes, 0),
  };
}

/**
 * Return the workers of a run, or of a buffer: {name, kind, since}. `kind` is "in", "soon" while the step still moves,
 * "out", "out slow" if somebody should look, "out slow left" if steps close without it, or "done". `since` is for how
 * many seconds a worker that is out has not been seen.
 */
export function workersOf(run, now) {
  const [still, isSlow] = [stillFor(run, now), isWaiting(run, now) || isLate(run, now)];
  const seen = (name) => run.missing_since?.[name] ?? run.updated_at;
  const missing = run.missing ?? run.members?.filter((name) => !(name in run.contributors_in)) ?? [];
  const left = run.left_out ?? missing.filter((name) => run.closed_at !== null && seen(name) < run.closed_at);
  const awaited = isSlow ? "out slow" : still === null && run.state !== "idle" ? "soon" : "out";
  const out = (kind) => (name) => ({ name, kind, since: kind.startsWith("out") ? Math.max(now - seen(name), 0) : null });
  const waited = missing.filter((name) => !left.includes(name));
  const there = Object.entries(run.contributors_in).filter(([name]) => !waited.includes(name) && !left.includes(name));
  return [
    ...left.map(out(run.ended ? "done" : "out slow left")),
    ...waited.map(out(run.ended ? "done" : awaited)),
    ...there.map(([name, adds]) => ({ name, kind: "in", since: null, adds })),
  ];
}

/**
 * Return how a run goes at the server's time `now`: {kind, text, isActive}. `kind` is "bad", "late", "on", "still" or
 * "over". `ill` says which values are not finite, if any are.
 */
export function stateOf(run, ill, now) {
  const rest = Math.max(now - run.updated_at, 0);
  const isOver = ["finished", "idle"].includes(run.state);
  const state = (kind, text) => ({ kind, text, isActive: !isOver });
  const { at, worker, error } = run.ended ?? {};
  if (run.state === "failed") return state("bad", `failed${worker ? ` on ${worker}` : ""}${error ? `: ${error}` : ""}`);
  if (ill) return state("bad", ill);
  if (run.state === "finished") return state("over", `finished ${distance(Math.min(at, now), now)}`);
  if (isOver) return state("over", `${run.count ? `stopped at ${count(run)}, ` : ""}no worker for ${span(rest)}`);
  const isSlow = isWaiting(run, now) || (isLate(run, now) && run.missing?.length > 0);
  const [begins, still] = [run.state === "joining" ? "joining, " : "", stillFor(run, now)];
  if (isSlow || still !== null) return state(isSlow ? "late" : "still", begins + waiting(run, still ?? rest));
  const gone = workersOf(run, now).filter(({ kind }) => kind === "out slow left");
  const since = span(Math.max(...gone.map((each) => each.since)));
  if (gone.length) return state("late", `running without ${missing(gone.map(({ name }) => name))} for ${since}`);
  const word = begins ? "joining" : "running";
  return rest < QUIET_SECONDS ? state("on", word) : state("still", `${word}, no add for ${span(rest)}`);
}
