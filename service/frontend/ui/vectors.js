// Vectors as strips of colour, and how alike two of them are.

import { empty, h, svg } from "./dom.js";
import { count, number } from "./format.js";
import { labelled } from "./classes.js";

const MAX_CELLS = 256;
const MAX_ROWS = 200;

const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);

/** Return the cosine of two vectors, NaN if one of them is zero. */
export const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));

/** Return the vectors as strips, and their similarity if there are two. */
export function comparison(vectors) {
  if (!vectors.flat().every(Number.isFinite)) return empty("The vector has values that are no finite numbers.");
  const most = Math.max(...vectors.flat().map(Math.abs), 1e-9);
  const strips = vectors.map((vector, index) => [h("p", { class: "hint" }, `${index ? "second" : "first"} input: ${count(vector.length, "number")}, length ${number(Math.sqrt(dot(vector, vector)))}`), strip(vector, most)]);
  if (vectors.length < 2) return [strips, h("p", { class: "hint" }, "Enter a second input to compare them.")].flat(2);
  return [likeness(cosine(...vectors)), strips].flat(2);
}

function likeness(similarity) {
  if (!Number.isFinite(similarity)) return empty("One of the vectors is zero: it has no direction to compare.");
  const scale = h("span", { class: "likeness", "aria-hidden": "true" });
  scale.style.setProperty("--at", (similarity + 1) / 2);
  return h("div", {}, h("p", { class: "headline" }, labelled("cosine similarity", number(similarity))), scale, h("p", { class: "likeness-ends hint" }, h("span", {}, "−1 opposite"), h("span", {}, "0 unrelated"), h("span", {}, "1 alike")));
}

function strip(vector, most) {
  return svg("svg", { viewBox: `0 0 ${Math.min(vector.length, MAX_CELLS)} 1`, preserveAspectRatio: "none", class: "strip", role: "img", "aria-label": `Vector of ${count(vector.length, "number")}` }, cells(vector, most, 0));
}

function cells(vector, most, y) {
  return vector.slice(0, MAX_CELLS).map((value, x) => svg("rect", { x, y, width: 1.02, height: 1.02, class: value < 0 ? "negative" : "positive", "fill-opacity": Math.min(1, Math.abs(value) / most).toFixed(2) }));
}

/** Return vectors of steps as rows of a map. */
export function heatmap(vectors) {
  if (!vectors.length) return empty("This input has no steps, so there is no vector.");
  if (!vectors.flat().every(Number.isFinite)) return empty("The vectors have values that are no finite numbers.");
  const shown = vectors.slice(0, MAX_ROWS);
  const most = Math.max(...shown.flat().map(Math.abs), 1e-9);
  const width = Math.min(shown[0].length, MAX_CELLS);
  return [
    svg("svg", { viewBox: `0 0 ${width} ${shown.length}`, preserveAspectRatio: "none", class: "heatmap", role: "img", "aria-label": `${count(vectors.length, "step")} of ${count(shown[0].length, "number")}` }, shown.map((vector, y) => cells(vector, most, y))),
    h("p", { class: "hint" }, `${count(vectors.length, "step")} from top to bottom, ${count(shown[0].length, "number")} each`),
  ];
}
