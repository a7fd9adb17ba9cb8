// The frame of the page: it finds out who asks, shows the view of the address, and says when the server is gone.

import * as api from "./api.js";
import { failure, put, say } from "./dom.js";
import { pause } from "./repeat.js";
import { signIn } from "./signin.js";

const main = document.getElementById("main");
const banner = document.getElementById("banner");

const VIEWS = {
  runs: ["Runs", () => import("./runs.js")],
  run: ["Run", () => import("./run.js")],
  buffers: ["Buffers", () => import("./buffers.js")],
  buffer: ["Buffer", () => import("./buffer.js")],
  operators: ["Operators", () => import("./operators.js")],
  graphs: ["Graphs", () => import("./graphs.js")],
  service: ["Service", () => import("./service.js")],
};

const SECTIONS = ["runs", "buffers", "operators", "graphs", "service"];

let caller = null;
let running = new AbortController();

/** Return the view and the parameters of an address: #/buffers/NAME?search=x. */
function place(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [first, ...rest] = path.split("/");
  const section = SECTIONS.includes(first) ? first : "runs";
  const name = rest.length && section === first ? decoded(rest.join("/")) : null;
  const view = name && ["runs", "buffers"].includes(section) ? section.slice(0, -1) : section;
  return { view, section, parameters: { name, query: new URLSearchParams(query) } };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function show() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const { view, section, parameters } = place(location.hash);
  for (const link of document.querySelectorAll(".bar nav a")) {
    if (link.hash === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [title, load] = VIEWS[view];
  document.title = `${["run", "buffer"].includes(view) ? parameters.name : title} – gradserve`;
  main.dataset.view = view;
  if (caller === null && !(await meet(signal))) return;
  put(main);
  try {
    const module = await load();
    if (!signal.aborted) await module.show(main, { api, caller, signal, parameters });
  } catch (error) {
    if (!signal.aborted) put(main, failure(error));
  }
}

/** Find out who the caller is, and wait for a server that is gone. Return whether a view may be shown. */
async function meet(signal) {
  while (!signal.aborted) {
    try {
      caller = await api.get("v1/caller", { signal });
      introduce();
      return !signal.aborted;
    } catch (error) {
      if (signal.aborted) return false;
      if (error.status === 401) {
        askForKey(api.hasKey() ? error.message : "");
        return false;
      }
      if (!(error instanceof api.Unreachable) && ![502, 503, 504].includes(error.status)) {
        put(main, failure(error));
        return false;
      }
      await pause(signal, 2000);
    }
  }
  return false;
}

function introduce() {
  const who = [caller.name, caller.namespace && `namespace ${caller.namespace}`].filter(Boolean).join(", ");
  say(document.getElementById("caller"), caller.keys ? who : "");
  document.getElementById("sign-out").hidden = !caller.keys;
}

function askForKey(reason) {
  running.abort();
  caller = null;
  say(document.getElementById("caller"), "");
  document.getElementById("sign-out").hidden = true;
  signIn(main, { api, reason, done: show });
}

api.watch((event) => {
  if (event === "unauthorized" && caller !== null) askForKey("This API key was removed, or has expired.");
  if (event === "unreachable" && banner.hidden) {
    banner.hidden = false;
    say(banner, "The server does not answer. What you see may be old; this page asks again by itself.");
  }
  if (event === "answered" && !banner.hidden) {
    banner.hidden = true;
    say(banner, "");
  }
});

document.getElementById("sign-out").addEventListener("click", () => {
  api.setKey(null);
  askForKey("");
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be a view's
  main.focus();
});

window.addEventListener("hashchange", () => {
  main.focus({ preventScroll: true }); // a view lasts until the next one, so this is before it is shown
  show();
});
show();
