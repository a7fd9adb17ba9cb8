// The charts of the service: which numbers of a sample each has, and how they are written.

import { general, many, size } from "./words.js";

/** The most lines of a chart, since its colours are as many. The rest are added up as "others". */
const MOST_LINES = 7;

const plain = (number) => (number < 999.5 ? general(number, 3) : Math.round(number).toLocaleString("en"));
export const rate = (number) => `${plain(number)}/s`;
const byteRate = (number) => `${size(number)}/s`;

/** Return a time: 420 µs, 3.1 ms, 1.2 s. */
export function duration(seconds) {
  if (seconds < 0.001) return `${general(seconds * 1e6, 3)} µs`;
  return seconds < 1 ? `${general(seconds * 1e3, 3)} ms` : `${general(seconds, 3)} s`;
}

/** Lines with these names. `of` reads the number of one of them in a sample. */
function fixed(names, of, colours) {
  return () => names.map((label, place) => ({ label, colour: colours?.[place], value: (sample) => of(sample, label) }));
}

function single(label, member) {
  return fixed([label], (sample) => sample[member]);
}

/** A line for each name that the samples have in a member, with 0 where a sample lacks the name. */
function keyed(member, colours = []) {
  return (samples) => {
    const totals = new Map();
    for (const sample of samples) {
      for (const [name, value] of Object.entries(sample[member])) totals.set(name, (totals.get(name) ?? 0) + value);
    }
    const names = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
    const [shown, rest] = [names.slice(0, MOST_LINES).sort(), names.slice(MOST_LINES)];
    const number = (sample, name) => sample[member][name] ?? 0;
    const line = (label, place) => ({ label, colour: colours[place], value: (sample) => number(sample, label) });
    const lines = shown.map(line);
    if (rest.length === 0) return lines;
    const others = (sample) => rest.reduce((sum, name) => sum + number(sample, name), 0);
    return [...lines, { label: many(rest.length, "other"), colour: "muted", value: others }];
  };
}

const PERCENTILES = ["p50", "p95", "p99"];
const HEAT = ["series-3", "series-1", "late-fill"];

const latencies = fixed(PERCENTILES, (sample, name) => sample.seconds?.[name] ?? null, HEAT);
const bodies = fixed(["received", "sent"], (sample, name) => sample[`${name}_bytes`]);
const waits = (sample, name) => sample[name.replace(" ", "_")];
const queue = fixed(["in flight", "waiting"], waits, ["series-1", "late-fill"]);

/** The phases in the order of a request. */
const PHASES = ["read", "queue", "decode", "kernel", "encode", "store", "write"];

const CHOICES = { choices: PERCENTILES, chosen: "p99" };

function phases(samples, percentile) {
  const met = PHASES.filter((phase) => samples.some((sample) => phase in sample.phases));
  return met.map((label) => ({
    label,
    colour: `series-${PHASES.indexOf(label) + 1}`,
    value: (sample) => sample.phases[label]?.[percentile] ?? null,
  }));
}

/** The share of the store's limit from which the chart has a line for it: earlier, it would flatten the other line. */
const LIMIT_SHOWN_FROM = 0.25;

function store(samples) {
  const last = samples.at(-1);
  const used = { label: "used", value: (sample) => sample.store_bytes };
  const limit = { label: "limit", colour: "late-fill", value: (sample) => sample.store_limit_bytes };
  return last && last.store_bytes > LIMIT_SHOWN_FROM * last.store_limit_bytes ? [used, limit] : [used];
}

const ofLimit = (sample) => (sample.store_bytes === null ? "" : `of ${size(sample.store_limit_bytes)}`);

function database(chosen) {
  return (samples) => {
    const names = [...new Set(samples.flatMap((sample) => Object.keys(sample.database)))].filter(chosen).sort();
    return names.map((name) => ({
      label: name.replace(/_bytes$/, "").replaceAll("_", " "),
      value: (sample) => sample.database[name] ?? null,
    }));
  };
}

const areBytes = (name) => name.endsWith("_bytes");

/**
 * The charts: their title, how a number is written, and the lines for the samples shown. `isLog`: the axis counts in
 * powers of ten. `isWhole`: it counts things. `optional`: a chart without lines is not shown. `choices`: the lines are
 * those of the chosen one. `aside`: a text beside the title.
 */
export const CHARTS = [
  { id: "requests", title: "Requests", note: "by route", format: rate, lines: keyed("requests") },
  { id: "latency", title: "Latency", note: "from head to answer", format: duration, isLog: true, lines: latencies },
  { id: "phases", title: "Time by phase", format: duration, isLog: true, lines: phases, ...CHOICES },
  { id: "errors", title: "Errors", note: "by code", format: rate, lines: keyed("errors", ["bad"]) },
  { id: "bytes", title: "Bytes", note: "of bodies", format: byteRate, lines: bodies },
  { id: "queue", title: "Queue", note: "requests", format: plain, isWhole: true, lines: queue },
  { id: "held", title: "Bytes in flight", format: size, isWhole: true, lines: single("in flight", "in_flight_bytes") },
  { id: "commits", title: "Commits", note: "of the store", format: rate, lines: single("commits", "commits") },
  { id: "store", title: "Store", format: size, lines: store, aside: ofLimit },
  { id: "buffers", title: "Buffers", format: plain, isWhole: true, lines: single("buffers", "buffers") },
  { id: "workers", title: "Processes", format: plain, isWhole: true, lines: single("processes", "workers") },
  { id: "database", title: "Database", format: plain, optional: true, lines: database((name) => !areBytes(name)) },
  { id: "database-bytes", title: "Database bytes", format: size, optional: true, lines: database(areBytes) },
];
