// A chart of one number by closed epoch.

import { h, say } from "./dom.js";
import { plot } from "./plot.js";
import { general, many } from "./words.js";

/** Return a chart of the member `label` of closed epochs: {element, set}. `set(epochs)` shows them; null is none. */
export function epochChart(label, signal) {
  let shown = [];
  const written = (number) => (number === null ? "none" : general(number, 4));
  const chart = plot({
    signal,
    height: 180,
    x: { format: String, isWhole: true },
    y: { format: (each) => general(each, 3) },
    dots: true,
    moved: tell,
  });
  const reading = h("p", { class: "muted reading" });
  /** Write the number at a place, or else the last one. */
  function tell(place) {
    const at = shown[place] ?? shown.at(-1);
    say(reading, at ? `epoch ${at.epoch}   ${label} ${written(at[label])}` : "");
  }
  return {
    element: h("div", {}, chart.element, reading),
    set(epochs) {
      shown = epochs;
      tell(null); // a cursor moves at once, since the chart has changed
      const values = epochs.map((each) => each[label]);
      const last = written(values.findLast((each) => each !== null) ?? null);
      const title = label[0].toUpperCase() + label.slice(1);
      const text = `${title} of ${many(values.length, "closed epoch")}; the last is ${last}`;
      chart.set(epochs.map((each) => each.epoch), [{ label, colour: "accent", values }], text);
    },
  };
}
