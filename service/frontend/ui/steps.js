// Answers with something for each step: labels on tokens, a span in a text, and candidates for the next token.

import { bar } from "./classes.js";
import { empty, h, hint, span } from "./dom.js";
import { count, score } from "./format.js";
import { colour, legend } from "./plot.js";

const MAX_STEPS = 600;

/** Return the tokens with the label of each. steps: what each shows, null if unknown. */
export function tagged(head, output, steps) {
  const { labels, scores } = output;
  if (!labels.length) return empty("This input has no steps, so there is nothing to label.");
  const aligned = steps?.length === labels.length ? steps : labels.map((_, index) => ({ text: `step ${index}`, gap: " " }));
  const shade = (label) => colour(head.labels.indexOf(label));
  const items = labels.slice(0, MAX_STEPS).flatMap((label, index) => [
    aligned[index].gap,
    token(aligned[index].text, label, scores[index], shade(label)),
  ]);
  const used = head.labels.filter((label) => labels.includes(label));
  const times = (label) => labels.filter((one) => one === label).length;
  const names = used.map((label) => [`${label} (${times(label)})`, shade(label)]);
  return [h("p", { class: "tokens" }, items), more(labels.length), legend(names)];
}

function token(text, label, value, shade) {
  const title = `${label}, score ${score(value)}`;
  return h("span", { class: `token ${shade}`, title }, span("token-text", text), span("token-label", label));
}

/** Return a sequence with its span marked. */
export function spanOf({ start, end, score: value }, steps) {
  if (!steps?.length) return h("p", { class: "headline" }, `steps ${start} to ${end}`);
  const part = (list) => list.map((step, index) => (index ? step.gap : "") + step.text).join("");
  const [before, inside, after] = [steps.slice(0, start), steps.slice(start, end + 1), steps.slice(end + 1)];
  const where = start === end ? `step ${start}` : `steps ${start} to ${end}`;
  const marked = h("mark", {}, part(inside));
  const text = [part(before), before.length ? inside[0].gap : "", marked, after.length ? after[0].gap : "", part(after)];
  return [h("p", { class: "passage" }, text), hint(`${where} of ${steps.length}, score ${score(value)}`)];
}

/** Return the likeliest next tokens. tokens: their texts, null for a model without a tokenizer. */
export function candidates({ ids, scores }, tokens) {
  if (!ids.length) return empty("The model has no candidate for the next token.");
  const name = (id, index) => (tokens ? `${shown(tokens.tokens[index])}  (${id})` : `token ${id}`);
  return h("ol", { class: "bars" }, ids.map((id, index) => bar(name(id, index), scores[index], index === 0)));
}

const shown = (text) => (text.trim() === text && text ? text : JSON.stringify(text));

const more = (steps) => steps > MAX_STEPS && hint(`the first ${MAX_STEPS} of ${count(steps, "step")}`);
