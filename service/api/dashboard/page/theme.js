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
  const set = () => (document.documentElement.dataset.theme = THEMES[place]);
  const changed = () => window.dispatchEvent(new Event("theme"));
  set();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const tell = () => {
      button.textContent = THEMES[place];
      button.title = `Theme: ${THEMES[place]}`;
      button.setAttribute("aria-label", button.title);
    };
    tell();
    button.addEventListener("click", () => {
      place = (place + 1) % THEMES.length;
      try {
        localStorage.setItem("theme", THEMES[place]);
      } catch {
        // as above
      }
      set();
      tell();
      changed();
    });
  });
}
