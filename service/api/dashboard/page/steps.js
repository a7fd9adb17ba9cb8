// A chart of one number by closed step.

import { h, say } from "./dom.js";
import { plot } from "./plot.js";
import { general, many } from "./words.js";

/** Return a chart of the member `label` of closed steps: {element, set}. `set(steps)` shows them; null is none. */
export function stepChart(label, signal) {
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
    say(reading, at ? `step ${at.step}   ${label} ${written(at[label])}` : "");
  }
  return {
    element: h("div", {}, chart.element, reading),
    set(steps) {
      shown = steps;
      tell(null); // a cursor moves at once, since the chart has changed
      const values = steps.map((each) => each[label]);
      const last = written(values.findLast((each) => each !== null) ?? null);
      const title = label[0].toUpperCase() + label.slice(1);
      const text = `${title} of ${many(values.length, "closed step")}; the last is ${last}`;
      chart.set(steps.map((each) => each.step), [{ label, colour: "accent", values }], text);
    },
  };
}
