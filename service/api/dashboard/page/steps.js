// A chart of one number by closed step.

import { h, say } from "./dom.js";
import { plot } from "./plot.js";
import { general, many } from "./words.js";

/** Return a chart of the member `label` of closed steps: {element, set}. `set(steps)` shows those that are known. */
export function stepChart(label, signal) {
  let shown = [];
  const [x, y] = [{ format: String, isWhole: true }, { format: (each) => general(each, 3) }];
  const chart = plot({ signal, height: 180, x, y, dots: true, moved: tell });
  const reading = h("p", { class: "muted reading" });
  /** Write the number at a place, or else the last one. */
  function tell(place) {
    const at = shown[place] ?? shown.at(-1);
    say(reading, at ? `step ${at.step}   ${label} ${general(at[label], 4)}` : "No step has closed yet.");
  }
  return {
    element: h("div", {}, chart.element, reading),
    set(steps) {
      shown = steps.filter((each) => each[label] !== null);
      tell(null); // a cursor moves at once, since the chart has changed
      chart.element.hidden = !shown.length;
      if (!shown.length) return;
      const [values, title] = [shown.map((each) => each[label]), label[0].toUpperCase() + label.slice(1)];
      const text = `${title} of ${many(values.length, "closed step")}; the last is ${general(values.at(-1), 4)}`;
      chart.set(shown.map((each) => each.step), [{ label, colour: "accent", values }], text);
    },
  };
}
