// How many elements have which magnitude, as bars.

import { h, put, svg } from "./dom.js";
import { general } from "./words.js";

/** Show how many elements have which magnitude. */
export function histogram(host, { bounds, counts }) {
  const some = counts.map((count, place) => (count ? place : -1)).filter((place) => place >= 0);
  if (!some.length) return put(host, h("p", { class: "muted" }, "All elements are zero or non-finite."));
  const [first, last] = [Math.max(some[0] - 1, 0), Math.min(some.at(-1) + 1, counts.length - 1)];
  const shown = counts.slice(first, last + 1);
  const [most, total] = [Math.max(...shown), shown.reduce((all, count) => all + count, 0)];
  const label = (place) => {
    const [low, high] = [bounds[place - 1], bounds[place]];
    if (low === undefined) return `below ${general(high, 3)}`;
    return high === undefined ? `from ${general(low, 3)}` : `${general(low, 3)} to ${general(high, 3)}`;
  };
  const width = 100 / shown.length;
  const bars = shown.map((count, place) => {
    const height = count ? Math.max((100 * count) / most, 1) : 0;
    const box = { x: place * width + width * 0.06, y: 100 - height, width: width * 0.88, height };
    return svg("rect", box, svg("title", {}, `${label(first + place)}: ${count.toLocaleString("en")} elements`));
  });
  const peak = first + shown.indexOf(most);
  const text = `Magnitudes of ${total.toLocaleString("en")} elements; most are ${label(peak)}`;
  const ends = [bounds[Math.max(first - 1, 0)], bounds[Math.min(last, bounds.length - 1)]];
  const middle = bounds[Math.min(Math.round((first + last - 1) / 2), bounds.length - 1)];
  const box = { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": text };
  const scale = [ends[0], middle, ends[1]].map((bound) => h("span", {}, general(bound, 2)));
  return put(host, svg("svg", box, bars), h("div", { class: "scale" }, scale));
}
