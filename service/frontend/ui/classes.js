// The answer of a classifier: its class, and a bar for each class.

import { empty, h } from "./dom.js";
import { score } from "./format.js";

const MAX_BARS = 12;

export const labelled = (name, value) => [h("span", { class: "headline-name" }, name), h("span", { class: "headline-value" }, value)];

/** Return the class and the bars of an output. */
export function classBars(head, output) {
  const entries = Object.entries(output.scores).sort(([, a], [, b]) => b - a);
  if (!entries.every(([, value]) => Number.isFinite(value))) return empty("The scores are no finite numbers: this input is outside of what the model can compute.");
  const chosen = head.multi_label ? output.labels : [output.label];
  const title = chosen.length ? chosen.join(", ") : "no class";
  const note = head.multi_label ? `score of at least ${score(head.threshold)}` : `score ${score(output.score)}`;
  const hidden = entries.length - MAX_BARS;
  return [
    h("p", { class: "headline" }, labelled(note, title)),
    h("ul", { class: "bars" }, entries.slice(0, MAX_BARS).map(([label, value]) => bar(label, value, chosen.includes(label)))),
    hidden > 0 && h("p", { class: "hint" }, `and ${hidden} more with a lower score`),
  ];
}

/** Return a bar for a share between 0 and 1. value: the text behind it. */
export function bar(label, share, chosen, value = score(share)) {
  const line = h("span", { class: "bar", "aria-hidden": "true" });
  line.style.setProperty("--share", Math.min(1, Math.max(0, share)));
  return h("li", { class: chosen ? "chosen" : null }, h("span", { class: "bar-label", title: label }, label), line, h("span", { class: "bar-value" }, value));
}
