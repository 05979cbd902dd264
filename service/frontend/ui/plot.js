// Plots as SVG: lines over steps, and areas on top of each other. The numbers are in the text beside a plot too, for screen readers.

import { h, svg } from "./dom.js";
import { number } from "./format.js";

export const COLOURS = 8;
export const WIDTH = 600;
/** Space above the highest and below the lowest value. */
export const EDGE = 8;
export const colour = (index) => `c${index % COLOURS}`;

/** Return the least and the largest finite value of lists, never equal. */
export function rangeOf(lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (!Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** Return an SVG path through the points whose value is finite. */
function path(points) {
  let d = "";
  let drawing = false;
  for (const [x, y] of points) {
    const finite = Number.isFinite(y);
    if (finite) d += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    drawing = finite;
  }
  return d;
}

/**
 * Return a figure of lines. lines: {values, class, from} each, from: the step of its first value, or {values, class, at}, at: the step of
 * each. marks: {step, value, class}. steps: how many steps the horizontal axis has.
 */
export function linePlot({ lines, marks = [], steps, label, height = 150, range }) {
  const [low, high] = range ?? rangeOf([...lines.map((line) => line.values), marks.map((mark) => mark.value)]);
  const x = (step) => (WIDTH * step) / Math.max(1, steps - 1);
  const y = (value) => EDGE + ((height - 2 * EDGE) * (high - value)) / (high - low);
  const levels = [high, low, ...(low < 0 && high > 0 ? [0] : [])];
  const grid = levels.map((value) => svg("line", { x1: 0, x2: WIDTH, y1: y(value), y2: y(value), class: "grid" }));
  const drawn = lines.map(({ values, from = 0, at, class: name }) => svg("path", { class: `line ${name}`, d: path(values.map((value, index) => [x(at ? at[index] : from + index), y(value)])) }));
  // A line without length has round ends, which stay round when the drawing is stretched.
  const dots = marks.filter((mark) => Number.isFinite(mark.value)).map((mark) => svg("path", { class: `dot ${mark.class}`, d: `M${x(mark.step)} ${y(mark.value)}h0.01` }));
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, height, preserveAspectRatio: "none", role: "img", "aria-label": label }, grid, drawn, dots);
  const axis = [high, low].map((value, index) => h("span", { class: index ? "axis low" : "axis high", "aria-hidden": "true" }, number(value)));
  return h("div", { class: "plot" }, axis, drawing);
}

/** Return a small plot of bars, newest last. The values of all series at one time stand on top of each other. top: the highest at least. */
export function barPlot({ series, label, slots, top = 0, width = 240, height = 48 }) {
  const totals = Array.from({ length: slots }, () => 0);
  const bars = series.map(({ values, class: name }) => ({ name, bars: values.map((value, index) => stacked(totals, slots - values.length + index, value)) }));
  const scale = height / (Math.max(top, ...totals) || 1);
  const slot = width / slots;
  const areas = bars.map(({ name, bars: stack }) => {
    const boxes = stack.filter((one) => one.size > 0).map(({ at, from, size }) => `M${(at * slot).toFixed(1)} ${(height - from * scale).toFixed(1)}h${(slot - 0.6).toFixed(1)}v${(-size * scale).toFixed(2)}h${(0.6 - slot).toFixed(1)}z`);
    return svg("path", { class: `area ${name}`, d: boxes.join("") });
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "spark", preserveAspectRatio: "none" }, svg("line", { x1: 0, x2: width, y1: height, y2: height, class: "grid" }), areas);
}

function stacked(totals, at, value) {
  const size = Number.isFinite(value) ? value : 0;
  totals[at] += size;
  return { at, from: totals[at] - size, size };
}

/** Return the names of colours: [name, class] each. */
export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, swatch]) => h("li", {}, h("span", { class: `swatch ${swatch}`, "aria-hidden": "true" }), name)));
}
