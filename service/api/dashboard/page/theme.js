// Set the theme before the first paint. Without a choice of the reader, the system's own theme holds.
"use strict";
{
  let theme = null;
  try {
    theme = localStorage.getItem("theme");
  } catch {
    // The browser keeps nothing for this page.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
