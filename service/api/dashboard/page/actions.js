// What can be done to a buffer: zero, download and delete, each after a question.

import { h, put, say } from "./dom.js";
import * as words from "./words.js";

/** Return the path of a buffer in the API. */
export function path(name, end = "") {
  return `v1/buffers/${encodeURIComponent(name)}${end}`;
}

/** Return the buttons for the caller. `seen()` is the buffer that the reader sees, {info, tag}. */
export function actions({ api, caller, seen, changed, deleted }) {
  const button = (text, act, kind = "") => h("button", { type: "button", class: kind, onclick: act }, text);
  const may = caller.scopes.includes("buffers:write");
  return h(
    "div",
    { class: "line actions" },
    button("Download", () => download(api, seen())),
    may && button("Zero", () => zero(api, seen(), changed)),
    may && button("Delete", () => remove(api, seen(), deleted), "danger"),
    !may && h("span", { class: "muted" }, "Read only: this key lacks buffers:write"),
  );
}

/**
 * Ask in a dialog. `act` does it; what it throws is shown, and the reader may try again. `act` may return a text, which
 * keeps the dialog open with this text.
 */
function ask({ title, text, fields = [], verb, kind = "main", ready = () => true, act }) {
  const error = h("p", { class: "bad", role: "alert" });
  const go = h("button", { class: kind }, verb);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h(
    "form",
    { novalidate: true },
    h("h2", { id: "question" }, title),
    text.map((each) => h("p", {}, each)),
    fields,
    error,
    h("div", { class: "line" }, cancel, go),
  );
  const dialog = h("dialog", { "aria-labelledby": "question" }, form);
  const judge = () => {
    go.disabled = !ready();
  };
  form.addEventListener("input", judge);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const more = await act();
      if (more === undefined) dialog.close();
      else put(error, more.text);
      if (more?.verb) say(go, more.verb);
    } catch (problem) {
      put(error, problem.message);
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
 * Return an act that changes the buffer as the reader saw it. The same act again has the same Idempotency-Key, unless
 * the buffer has changed since: then the reader sees its new state first, and the next act is of any state.
 */
function change(api, { info, tag }, method, end, verb, done) {
  let [match, key] = [tag, api.newIdempotencyKey()];
  return async () => {
    try {
      await api.request(path(info.name, end), { method, headers: { "Idempotency-Key": key, "If-Match": match } });
      done();
      return undefined;
    } catch (problem) {
      if (problem.status !== 412) throw problem;
      [match, key] = ["*", api.newIdempotencyKey()];
      const now = await api.get(path(info.name));
      return {
        text: `The buffer has changed since you looked: epoch ${now.epoch}, count ${words.count(now)}.`,
        verb: `${verb} anyway`,
      };
    }
  };
}

function zero(api, seen, changed) {
  const { info } = seen;
  ask({
    title: `Zero ${info.name}?`,
    text: [
      `The sum of ${words.many(info.count, "gradient")} in epoch ${info.epoch} is discarded.`,
      `Epoch ${info.epoch + 1} begins.`,
    ],
    verb: "Zero",
    kind: "danger main",
    act: change(api, seen, "POST", "/zero", "Zero", changed),
  });
}

function remove(api, seen, deleted) {
  const { info } = seen;
  const field = h("input", { id: "confirm", autocomplete: "off", spellcheck: "false" });
  ask({
    title: `Delete ${info.name}?`,
    text: [
      `Its sum of ${words.many(info.count, "gradient")} and its closed epochs (${info.closed_epochs.length}) are lost.`,
    ],
    fields: [h("label", { for: "confirm" }, "Type the name of the buffer to delete it"), field],
    verb: "Delete",
    kind: "danger main",
    ready: () => field.value === info.name,
    act: change(api, seen, "DELETE", "", "Delete", deleted),
  });
}

const FORMS = { safetensors: ["application/vnd.safetensors", "safetensors"], JSON: ["application/json", "json"] };

/** Ask what to download. The value is fetched with the key in a header: a link would need the key in its address. */
export function download(api, { info }, epoch = null) {
  const option = (value, text) => h("option", { value }, text);
  const epochs = [...info.closed_epochs].sort((a, b) => b - a).map((each) => option(each, `epoch ${each}, closed`));
  const which = h("select", { id: "which" }, option("", `epoch ${info.epoch}, running`), epochs);
  if (epoch !== null) which.value = epoch;
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

async function save(api, name, epoch, reduce, [type, suffix]) {
  const query = new URLSearchParams({ reduce, ...(epoch === "" ? {} : { epoch }) });
  const answer = await api.request(path(name, `/value?${query}`), { headers: { Accept: type } });
  const link = h("a", {
    href: URL.createObjectURL(await answer.blob()),
    download: `${name}${epoch === "" ? "" : `.epoch-${epoch}`}.${suffix}`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // a browser may ask first where to save it
}
