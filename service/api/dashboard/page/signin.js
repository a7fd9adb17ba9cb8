// The form that asks for an API key.

import { h, prose, put } from "./dom.js";

/** Show the form in `main`. The key is tried before it is kept. `done` is called once a key is right. */
export function signIn(main, { api, reason, done }) {
  const typed = { type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "gs_…" };
  const field = h("input", { id: "key", "aria-describedby": "key-hint key-error", ...typed });
  const hint = prose("The key stays in this tab, until you sign out or close it. `gradserve keys add` makes keys.");
  const error = h("p", { id: "key-error", class: "bad", role: "alert" }, reason);
  const form = h(
    "form",
    { class: "sign-in", novalidate: true },
    h("h1", {}, "Sign in"),
    h("p", {}, "This server wants an API key. You see the buffers of its namespace, and do what its scopes allow."),
    h("label", { for: "key" }, "API key"),
    h("div", { class: "line" }, field, h("button", { class: "main" }, "Sign in")),
    error,
    h("p", { id: "key-hint", class: "muted" }, hint),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = field.value.trim();
    if (!/^[!-~]+$/.test(key)) {
      put(error, key ? "A key has no spaces, and only ASCII characters." : "Enter a key.");
      field.focus();
      return;
    }
    try {
      await api.get("v1/caller", { key });
      api.setKey(key);
      await done();
    } catch (problem) {
      put(error, problem.message);
      field.focus();
      field.select();
    }
  });
  put(main, form);
  document.title = "Sign in – gradserve";
  field.focus();
}
