// The theme: the system's, light, or dark. It is set before the first paint, so this is no module.
"use strict";
{
  const THEMES = ["system", "light", "dark"];
  let place = 0;
  try {
    place = Math.max(0, THEMES.indexOf(localStorage.getItem("theme")));
  } catch {
    // The browser keeps nothing for this page: a choice holds until the page is loaded again.
  }
  const changed = () => window.dispatchEvent(new Event("theme"));
  document.documentElement.dataset.theme = THEMES[place];
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

  function show(button) {
    document.documentElement.dataset.theme = button.textContent = THEMES[place];
    button.title = `Theme: ${THEMES[place]}`;
    button.setAttribute("aria-label", button.title);
  }

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    show(button);
    button.addEventListener("click", () => {
      place = (place + 1) % THEMES.length;
      show(button);
      changed();
      try {
        localStorage.setItem("theme", THEMES[place]);
      } catch {
        // as above
      }
    });
  });
}
