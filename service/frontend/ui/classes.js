// The answer of a classifier: its class, and a bar for each class.

import { empty, h, headline, hint, span } from "./dom.js";
import { score } from "./format.js";

const MAX_BARS = 12;
const NOT_FINITE = "The scores are no finite numbers: this input is outside of what the model can compute.";

/** Return the class and the bars of an output. */
export function classBars(head, output) {
  const entries = Object.entries(output.scores).sort(([, a], [, b]) => b - a);
  if (!entries.every(([, value]) => Number.isFinite(value))) return empty(NOT_FINITE);
  const chosen = head.multi_label ? output.labels : [output.label];
  const note = head.multi_label ? `score of at least ${score(head.threshold)}` : `score ${score(output.score)}`;
  const bars = entries.slice(0, MAX_BARS).map(([label, value]) => bar(label, value, chosen.includes(label)));
  const hidden = entries.length - MAX_BARS;
  return [
    headline(note, chosen.length ? chosen.join(", ") : "no class"),
    h("ul", { class: "bars" }, bars),
    hidden > 0 && hint(`and ${hidden} more with a lower score`),
  ];
}

/** Return a bar for a share between 0 and 1. value: the text behind it. from, zero: where the bar begins, and where a line for 0 is. */
export function bar(label, share, chosen, value = score(share), { from = 0, zero = 0 } = {}) {
  const line = h("span", { class: zero ? "bar signed" : "bar", "aria-hidden": "true" });
  Object.entries({ share: Math.min(1, Math.max(0, share)), from, zero }).forEach(([name, at]) => line.style.setProperty(`--${name}`, at));
  const name = h("span", { class: "bar-label", title: label }, label);
  return h("li", { class: chosen && "chosen" }, name, line, span("bar-value", value));
}
