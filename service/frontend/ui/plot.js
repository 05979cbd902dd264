// Plots as SVG: lines over steps, and bars on top of each other. Each has a label that says what it shows.

import { h, svg, swatch } from "./dom.js";
import { number } from "./format.js";

export const COLOURS = 8;
export const WIDTH = 600;
/** Space above the highest and below the lowest value. */
export const EDGE = 8;
/** Space between two bars. */
const GAP = 0.6;
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

/** Return the lines of the first columns of rows. */
export function columnLines(rows, columns) {
  return Array.from({ length: columns }, (_, index) => ({ values: rows.map((row) => row[index]), class: colour(index) }));
}

/**
 * Return a plot of lines. lines: {values, class} each, with `from`, the step of the first value, or `at`, the step of each.
 * marks: {step, value, class}. steps: how many the horizontal axis has.
 */
export function linePlot({ lines, marks = [], steps, label, height = 150, range }) {
  const [low, high] = range ?? rangeOf([...lines.map((line) => line.values), marks.map((mark) => mark.value)]);
  const x = (step) => (WIDTH * step) / Math.max(1, steps - 1);
  const y = (value) => EDGE + ((height - 2 * EDGE) * (high - value)) / (high - low);
  const levels = [high, low, ...(low < 0 && high > 0 ? [0] : [])];
  const grid = levels.map((value) => svg("line", { x1: 0, x2: WIDTH, y1: y(value), y2: y(value), class: "grid" }));
  const points = ({ values, from = 0, at }) => values.map((value, index) => [x(at ? at[index] : from + index), y(value)]);
  const drawn = lines.map((line) => svg("path", { class: `line ${line.class}`, d: path(points(line)) }));
  // A line without length has round ends, which stay round when the drawing is stretched.
  const dot = (mark) => svg("path", { class: `dot ${mark.class}`, d: `M${x(mark.step)} ${y(mark.value)}h0.01` });
  const dots = marks.filter((mark) => Number.isFinite(mark.value)).map(dot);
  const end = (value, name) => h("span", { class: `axis ${name}`, "aria-hidden": "true" }, number(value));
  const axis = [end(high, "high"), end(low, "low")];
  return h("div", { class: "plot" }, axis, drawing({ width: WIDTH, height, label }, grid, drawn, dots));
}

/** Return a drawing that is stretched to the width of its place. */
function drawing({ width, height, label, class: name = null }, ...shapes) {
  const size = { viewBox: `0 0 ${width} ${height}`, height, preserveAspectRatio: "none" };
  return svg("svg", { ...size, class: name, role: "img", "aria-label": label }, shapes);
}

/** Return a small plot of bars, newest last. The values of all series at one time are stacked. top: the highest at least. */
export function barPlot({ series, label, slots, top = 0, width = 240, height = 48 }) {
  const totals = Array.from({ length: slots }, () => 0);
  const stack = ({ values }) => values.map((value, index) => stacked(totals, slots - values.length + index, value));
  const stacks = series.map(stack);
  const scale = height / (Math.max(top, ...totals) || 1);
  const slot = width / slots;
  const box = ({ at, from, size }) => {
    const [left, bottom, side] = [at * slot, height - from * scale, slot - GAP].map((one) => one.toFixed(2));
    return `M${left} ${bottom}h${side}v${(-size * scale).toFixed(2)}h-${side}z`;
  };
  const shape = (bars) => bars.filter((one) => one.size > 0).map(box).join("");
  const areas = stacks.map((bars, index) => svg("path", { class: `area ${series[index].class}`, d: shape(bars) }));
  const ground = svg("line", { x1: 0, x2: width, y1: height, y2: height, class: "grid" });
  return drawing({ width, height, label, class: "spark" }, ground, areas);
}

function stacked(totals, at, value) {
  const size = Number.isFinite(value) ? value : 0;
  totals[at] += size;
  return { at, from: totals[at] - size, size };
}

/** Return the names of colours: [name, class] each. */
export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, shade]) => h("li", {}, swatch(shade), name)));
}
