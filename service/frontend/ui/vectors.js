// Vectors as strips of colour, and how alike two of them are.

import { empty, h, headline, hint, span, svg } from "./dom.js";
import { count, number } from "./format.js";

const MAX_CELLS = 256;
const MAX_ROWS = 200;

const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);

/** Return the cosine of two vectors, NaN if one of them is zero. */
export const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));

/** Return the vectors as strips, and their similarity if there are two. */
export function comparison(vectors) {
  if (!vectors.flat().every(Number.isFinite)) return empty("The vector has values that are no finite numbers.");
  const most = largest(vectors);
  const strips = vectors.map((vector, index) => [hint(describe(vector, index)), strip(vector, most)]);
  if (vectors.length < 2) return [strips, hint("Enter a second input to compare them.")];
  return [likeness(cosine(...vectors)), strips];
}

function describe(vector, index) {
  const length = number(Math.sqrt(dot(vector, vector)));
  return `${index ? "second" : "first"} input: ${count(vector.length, "number")}, length ${length}`;
}

function likeness(similarity) {
  if (!Number.isFinite(similarity)) return empty("One of the vectors is zero: it has no direction to compare.");
  const scale = h("span", { class: "likeness", "aria-hidden": "true" });
  scale.style.setProperty("--at", (similarity + 1) / 2);
  const ends = ["−1 opposite", "0 unrelated", "1 alike"].map((end) => span("end", end));
  return [headline("cosine similarity", number(similarity)), scale, h("p", { class: "likeness-ends hint" }, ends)];
}

const strip = (vector, most) => map("strip", `Vector of ${count(vector.length, "number")}`, [vector], most);

/** Return vectors of steps as rows of a map. */
export function heatmap(vectors) {
  if (!vectors.length) return empty("This input has no steps, so there is no vector.");
  if (!vectors.flat().every(Number.isFinite)) return empty("The vectors have values that are no finite numbers.");
  const [steps, numbers] = [count(vectors.length, "step"), count(vectors[0].length, "number")];
  const shown = vectors.slice(0, MAX_ROWS);
  const rows = map("heatmap", `${steps} of ${numbers}`, shown, largest(shown));
  return [rows, hint(`${steps} from top to bottom, ${numbers} each`)];
}

const largest = (vectors) => Math.max(...vectors.flat().map(Math.abs), 1e-9);

/** Return a drawing with a row for each vector. most: the size of the darkest number. */
function map(name, label, vectors, most) {
  const width = Math.min(vectors[0].length, MAX_CELLS);
  const size = { viewBox: `0 0 ${width} ${vectors.length}`, preserveAspectRatio: "none" };
  const rows = vectors.map((vector, y) => cells(vector, most, y));
  return svg("svg", { ...size, class: name, role: "img", "aria-label": label }, rows);
}

function cells(vector, most, y) {
  return vector.slice(0, MAX_CELLS).map((value, x) => {
    const share = Math.min(1, Math.abs(value) / most).toFixed(2);
    const name = value < 0 ? "negative" : "positive";
    return svg("rect", { x, y, width: 1.02, height: 1.02, class: name, "fill-opacity": share });
  });
}
