// A text in a box, with a button that copies it.

import { h, say } from "./dom.js";

const NEWS = "news"; // the element whose text screen readers read out

/** Return a box with a title: {element, show}. `show(text)` shows another text, or, with null, `why` there is none. */
export function copyBox(title, why, kind = null) {
  const code = h("code");
  const pre = h("pre", { class: kind, tabindex: "0", role: "group", "aria-label": title }, code);
  const button = h("button", { type: "button", "aria-label": `Copy ${title}` }, "Copy");
  button.addEventListener("click", async () => {
    await copy(code);
    say(button, "Copied");
    say(document.getElementById(NEWS), `${title}: copied`);
    setTimeout(() => say(button, "Copy"), 2000);
  });
  return {
    element: h("section", { class: "panel copy" }, h("h2", {}, title, button), pre),
    show(text) {
      say(code, text ?? why);
      pre.classList.toggle("muted", text === null);
      button.disabled = text === null;
    },
  };
}

/** Copy the text of an element. Over plain HTTP, browsers offer no clipboard but that of a selection. */
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
  } catch {
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
}
