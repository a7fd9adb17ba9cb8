// What can be done to a buffer: zero, download and delete, each after a question.

import { button, h, put, say } from "./dom.js";
import * as words from "./words.js";

/** Return the path of a buffer in the API. */
export function path(name, end = "") {
  return `v1/buffers/${encodeURIComponent(name)}${end}`;
}

/** Return the buttons for the caller. `seen()` is the buffer that the reader sees, {info, tag}. */
export function actions({ api, caller, seen, changed, deleted }) {
  const writes = [
    button("Zero", () => zero(api, seen(), changed)),
    button("Delete", () => remove(api, seen(), deleted), { class: "danger" }),
  ];
  const none = h("span", { class: "muted" }, "Read only: this key lacks buffers:write");
  const read = button("Download", () => download(api, seen()));
  return h("div", { class: "line actions" }, read, caller.scopes.includes("buffers:write") ? writes : none);
}

/**
 * Ask in a dialog. `act` does it; what it throws is shown, and the reader may try again, with the error's `verb` if it
 * has one.
 */
function ask({ title, text, fields = [], verb, kind = "main", ready = () => true, act }) {
  const error = h("p", { class: "bad", role: "alert" });
  const go = h("button", { class: kind }, verb);
  const cancel = button("Cancel", () => dialog.close());
  const heading = h("h2", { id: "question" }, title);
  const paragraphs = text.map((each) => h("p", {}, each));
  const buttons = h("div", { class: "line" }, cancel, go);
  const form = h("form", { novalidate: true }, heading, paragraphs, fields, error, buttons);
  const dialog = h("dialog", { "aria-labelledby": "question" }, form);
  const judge = () => go.toggleAttribute("disabled", !ready());
  form.addEventListener("input", judge);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      await act();
      dialog.close();
    } catch (problem) {
      put(error, problem.message);
      if (problem.verb) say(go, problem.verb);
    }
    judge();
  });
  dialog.addEventListener("close", () => dialog.remove()); // the browser gives the focus back to the button
  document.body.append(dialog);
  judge();
  dialog.showModal();
  (fields.length ? form.querySelector("input, select") : cancel).focus();
}

/**
 * Ask whether to change the buffer as the reader saw it. The same act again has the same Idempotency-Key, unless the
 * buffer has changed since: then the reader sees its new state first, and the next act is of any state.
 */
function change(api, { info, tag }, { verb, method, end = "", done, ...question }) {
  let [match, key] = [tag, api.newIdempotencyKey()];
  async function act() {
    try {
      await api.request(path(info.name, end), { method, headers: { "Idempotency-Key": key, "If-Match": match } });
      done();
    } catch (problem) {
      if (problem.status !== 412) throw problem;
      [match, key] = ["*", api.newIdempotencyKey()];
      const now = await api.get(path(info.name));
      const text = `The buffer has changed since you looked: step ${now.step}, count ${words.count(now)}.`;
      throw Object.assign(new Error(text), { verb: `${verb} anyway` });
    }
  }
  ask({ title: `${verb} ${info.name}?`, verb, kind: "danger main", act, ...question });
}

function zero(api, seen, done) {
  const { count, step } = seen.info;
  const text = [
    `The sum of ${words.many(count, "gradient")} in step ${step} is discarded.`,
    `Step ${step + 1} begins.`,
  ];
  change(api, seen, { verb: "Zero", method: "POST", end: "/zero", done, text });
}

function remove(api, seen, done) {
  const { name, count, closed_steps: closed } = seen.info;
  const text = [`Its sum of ${words.many(count, "gradient")} and its closed steps (${closed.length}) are lost.`];
  const field = h("input", { id: "confirm", autocomplete: "off", spellcheck: "false" });
  const fields = [h("label", { for: "confirm" }, "Type the name of the buffer to delete it"), field];
  const ready = () => field.value === name;
  change(api, seen, { verb: "Delete", method: "DELETE", done, text, fields, ready });
}

const FORMS = { safetensors: ["application/vnd.safetensors", "safetensors"], JSON: ["application/json", "json"] };

/** Ask what to download. The value is fetched with the key in a header: a link would need the key in its address. */
export function download(api, { info }, step = "") {
  const option = (value, text) => h("option", { value }, text);
  const steps = [...info.closed_steps].sort((a, b) => b - a).map((each) => option(each, `step ${each}, closed`));
  const which = h("select", { id: "which" }, option("", `step ${info.step}, running`), steps);
  which.value = step;
  const reduce = h("select", { id: "reduce" }, option("sum", "sum"), option("mean", "mean"));
  const form = h("select", { id: "form" }, Object.keys(FORMS).map((name) => option(name, name)));
  const field = (label, select) => [h("label", { for: select.id }, label), select];
  ask({
    title: `Download ${info.name}`,
    text: [`${words.shape(info.shape)} ${info.dtype}, ${words.size(info.bytes)}`],
    fields: [h("div", { class: "facts" }, field("value of", which), field("as", reduce), field("format", form))],
    verb: "Download",
    act: () => save(api, info.name, which.value, reduce.value, FORMS[form.value]),
  });
}

async function save(api, name, step, reduce, [type, suffix]) {
  const query = new URLSearchParams({ reduce, ...(step === "" ? {} : { step }) });
  const answer = await api.request(path(name, `/value?${query}`), { headers: { Accept: type } });
  const end = step === "" ? "" : `.step-${step}`;
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: `${name}${end}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // a browser may ask first where to save it
}
