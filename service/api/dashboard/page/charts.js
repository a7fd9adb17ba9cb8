// Small charts. Each has a text for readers of a screen.

import { h, mark, put, svg } from "./dom.js";
import { general } from "./words.js";

/** Return a colour of page.css, as a canvas takes it: the value of a custom property, in the theme of now. */
export function colour(name) {
  const probe = h("span", { style: { color: `var(--${name})` }, hidden: true });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** Call `draw` whenever the theme changes, until the signal aborts. */
export function onTheme(signal, draw) {
  window.addEventListener("theme", draw, { signal });
}

/**
 * Return a chart of lines over x: `set(data, label)` takes uPlot's columns, [x, y, ...], and a text for readers of a
 * screen. `x` is x's name, `series` are {label, colour, points, value}, `axes` are uPlot's options but colours.
 */
export async function lines(host, { x, series, signal, time = false, height = 180, axes = [{}, {}], scales = {} }) {
  const { default: UPlot } = await import("./uPlot.esm.js");
  let [chart, data, text] = [null, series.map(() => []).concat([[]]), ""];
  const axis = (given) => ({
    stroke: () => colour("muted"),
    font: "12px system-ui",
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
    ...given,
  });
  const make = () => {
    chart?.destroy();
    chart = new UPlot(
      {
        width: host.clientWidth || 300,
        height,
        legend: { live: true },
        cursor: { y: false },
        scales: { x: { time }, ...scales },
        axes: axes.map(axis),
        series: [
          { label: x, value: (_, value) => value ?? "" },
          ...series.map((each) => ({
            label: each.label,
            stroke: colour(each.colour),
            width: 1.5,
            points: { show: each.points },
            value: each.value,
          })),
        ],
      },
      data,
      host,
    );
    chart.over.setAttribute("role", "img");
    mark(chart.over, "aria-label", text);
  };
  const sized = new ResizeObserver(
    () => chart && host.clientWidth && chart.setSize({ width: host.clientWidth, height }),
  );
  sized.observe(host);
  onTheme(signal, make);
  signal.addEventListener("abort", () => {
    sized.disconnect();
    chart?.destroy();
  });
  return {
    set(columns, label) {
      [data, text] = [columns, label];
      if (chart === null) make();
      else chart.setData(data);
      mark(chart.over, "aria-label", text);
    },
  };
}

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
  const [width, height] = [100 / shown.length, 100];
  const bars = shown.map((count, place) => {
    const size = count ? Math.max((height * count) / most, 1) : 0;
    return svg(
      "rect",
      { x: place * width + width * 0.06, y: height - size, width: width * 0.88, height: size },
      svg("title", {}, `${label(first + place)}: ${count.toLocaleString("en")} elements`),
    );
  });
  const peak = first + shown.indexOf(most);
  const text = `Magnitudes of ${total.toLocaleString("en")} elements; most are ${label(peak)}`;
  const ends = [bounds[Math.max(first - 1, 0)], bounds[Math.min(last, bounds.length - 1)]];
  const middle = bounds[Math.min(Math.round((first + last - 1) / 2), bounds.length - 1)];
  return put(
    host,
    svg(
      "svg",
      { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": text },
      bars,
    ),
    h(
      "div",
      { class: "scale" },
      [ends[0], middle, ends[1]].map((bound) => h("span", {}, general(bound, 2))),
    ),
  );
}
