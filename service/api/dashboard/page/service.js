// The service: how much it does, how fast, and with which settings.

import { empty, failure, h, mark, put, say } from "./dom.js";
import { follow, step, withGaps } from "./live.js";
import { liveChart } from "./live_chart.js";
import { CHARTS, duration, rate } from "./measures.js";
import { bar, setBar } from "./progress.js";
import { settingsPanel } from "./settings.js";
import { share, size, span, zone } from "./words.js";

const SPANS = [["5 min", 300], ["15 min", 900], ["1 h", 3600]];

const MINUTE = 60;

export async function show(main, { api, caller, signal, parameters }) {
  if (!caller.scopes.includes("admin")) return put(main, refusal(caller));
  const about = await api.get("v1/service", { signal });
  const samples = [];
  const view = { seconds: 900, choices: {} };
  const charts = CHARTS.map((each) => chartOf(each, view, signal, drawAll));
  const tiles = tilesOf(about);
  const state = h("span", { class: "state muted", role: "status" }, "connecting");
  const hours = h("span", { class: "muted" }, `times are UTC${zone()}`);
  put(
    main,
    h("div", { class: "line top" }, h("h1", {}, "Service"), state, hours, spans(view, drawAll)),
    tiles.element,
    h("div", { class: "panels charts" }, charts.map((each) => each.element)),
    settingsPanel(about, parameters.query.get("settings")),
  );
  function drawAll() {
    const now = samples.at(-1)?.at ?? api.now();
    const begin = Math.max(now - view.seconds, Math.min(samples[0]?.at ?? now, now - MINUTE));
    const rows = withGaps(samples, begin);
    for (const chart of charts) chart.draw(rows, [begin, now]);
    tiles.set(samples, api.now());
  }
  await follow(samples, {
    api,
    signal,
    changed(error) {
      if (error?.status === 403) return put(main, failure(error)); // the key has lost its scope
      mark(state, "class", error ? "state late" : "state on");
      say(state, error ? "waiting for the server" : "live");
      drawAll();
    },
  });
}

function refusal({ scopes }) {
  const has = `Your API key has ${scopes.join(", ") || "no scopes"}.`;
  return empty("This view needs the scope admin", `${has} Sign out, and sign in with a key that has the scope admin.`);
}

/** A group of buttons for the time that the charts show. */
function spans(view, changed) {
  const pressed = (seconds) => String(view.seconds === seconds);
  const buttons = SPANS.map(([label, seconds]) =>
    h("button", { type: "button", "aria-pressed": pressed(seconds), onclick: () => choose(seconds) }, label),
  );
  function choose(seconds) {
    view.seconds = seconds;
    buttons.forEach((each, place) => mark(each, "aria-pressed", pressed(SPANS[place][1])));
    changed();
  }
  return h("div", { class: "choice", role: "group", "aria-label": "Time shown" }, buttons);
}

function chartOf(description, view, signal, changed) {
  const { id, lines, optional, aside, chosen } = description;
  view.choices[id] = chosen;
  const chart = liveChart(description, {
    signal,
    choose(value) {
      view.choices[id] = value;
      changed();
    },
  });
  return {
    element: chart.element,
    draw(rows, range) {
      const samples = rows.flatMap(({ sample }) => sample ?? []);
      const found = lines(samples, view.choices[id]);
      chart.element.hidden = Boolean(optional) && found.length === 0;
      if (chart.element.hidden) return;
      if (aside && samples.length) say(chart.aside, aside(samples.at(-1)));
      const at = rows.map((each) => each.at);
      const values = (line) => rows.map(({ sample }) => (sample === null ? null : line.value(sample)));
      chart.set({ at, range, lines: found.map((line) => ({ ...line, values: values(line) })) });
    },
  };
}

function tilesOf({ version, started_at: started, replicas, python }) {
  const values = {};
  const tile = (name, title, text = "–") => {
    values[name] = h("dd", {}, text);
    return h("div", { "data-tile": name }, h("dt", {}, title), values[name]);
  };
  const used = bar();
  const element = h(
    "dl",
    { class: "tiles panel" },
    tile("requests", "requests"),
    tile("p99", "p99 latency"),
    tile("errors", "errors in the last minute"),
    h("div", { "data-tile": "store" }, h("dt", {}, "store used", used), (values.store = h("dd", {}, "–"))),
    tile("workers", "processes"),
    replicas !== null && tile("replicas", "replicas", String(replicas)),
    tile("uptime", "uptime"),
    tile("version", `version, on Python ${python}`, version),
  );
  return {
    element,
    set(samples, now) {
      say(values.uptime, span(Math.max(0, now - started)));
      const last = samples.at(-1);
      if (last === undefined) return;
      say(values.requests, rate(sum({ ...last.requests, page: 0 })));
      say(values.p99, last.seconds ? duration(last.seconds.p99) : "–");
      const failed = errorsIn(samples, last.at - MINUTE);
      say(values.errors, failed.toLocaleString("en"));
      values.errors.classList.toggle("late", failed > 0);
      say(values.workers, String(last.workers));
      say(values.workers.previousSibling, last.workers === 1 ? "process" : "processes");
      if (last.store_bytes === null) return;
      const part = last.store_bytes / last.store_limit_bytes;
      say(values.store, `${size(last.store_bytes)}, ${share(last.store_bytes, last.store_limit_bytes)}`);
      setBar(used, part, part > 0.9);
    },
  };
}

function sum(numbers) {
  return Object.values(numbers).reduce((all, each) => all + each, 0);
}

/** The number of errors since a time: each rate holds for the time since the sample before. */
function errorsIn(samples, since) {
  const shown = samples.filter((each) => each.at > since);
  const before = samples[samples.length - shown.length - 1];
  const counts = shown.map((each, place) => {
    const begin = (shown[place - 1] ?? before)?.at ?? each.at - step;
    return sum(each.errors) * Math.min(each.at - begin, 2 * step);
  });
  return Math.round(counts.reduce((all, each) => all + each, 0));
}
