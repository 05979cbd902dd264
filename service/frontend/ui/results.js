// The answer to a request, drawn as the head of the model needs it.

import { bar, classBars } from "./classes.js";
import { empty, h, headline, hint } from "./dom.js";
import { forecast } from "./forecast.js";
import { count, number } from "./format.js";
import { candidates, spanOf, tagged } from "./steps.js";
import { comparison, heatmap } from "./vectors.js";

const MAX_VALUES = 24;
const NOT_FINITE = "The answer has values that are no finite numbers: this input is outside of what the model can compute.";

/** Return the elements of an answer. sent: the sequences; tokens: of each text, from POST /tokens; ahead: forecast rows. */
export function drawAnswer(model, outputs, sent, { tokens = null, ahead = null } = {}) {
  const [output] = outputs;
  const draw = {
    classify: () => classBars(model.head, output),
    regress: () => regression(model, output, sent[0], ahead),
    tag: () => tagged(model.head, output, stepsOf(model, sent[0], tokens?.[0])),
    span: () => spanOf(output, stepsOf(model, sent[0], tokens?.[0])),
    next: () => candidates(output, tokens?.[0]),
    embed: () => comparison(outputs.map((one) => one.embedding)),
    sequence: () => heatmap(output.sequence),
  }[model.head.kind];
  return draw ? draw() : h("pre", { tabindex: "0" }, JSON.stringify(output, null, 2));
}

/** Return what each step of a sequence shows: {text, gap}, gap: the text between it and the step before. */
export function stepsOf(model, sequence, tokens) {
  if (Array.isArray(sequence)) return sequence.map((step) => ({ text: [step].flat().join(" "), gap: " " }));
  if (!tokens?.offsets) return null;
  const characters = Array.from(sequence); // offsets count code points
  let end = 0;
  return tokens.offsets.map(([first, last], index) => {
    const gap = characters.slice(end, first).join("");
    end = Math.max(end, last);
    return { text: characters.slice(first, last).join("") || tokens.tokens[index], gap };
  });
}

function regression({ input }, { value }, sequence, ahead) {
  const values = [value].flat();
  if (!values.every(Number.isFinite)) return empty(NOT_FINITE);
  if (ahead && sequence.length) return forecast(sequence, ahead, input.names);
  return values.length === 1 ? headline("value", number(values[0])) : valueBars(values);
}

/** Values that stand beside each other: the bars of negative ones are to the left of a line for zero. */
function valueBars(values) {
  const shown = values.slice(0, MAX_VALUES);
  const [low, high] = [Math.min(0, ...shown), Math.max(1e-9, ...shown)];
  const share = (size) => size / (high - low);
  const rest = values.length - shown.length;
  const bars = shown.map((value, index) => {
    const place = { from: share(Math.min(0, value) - low), zero: share(-low) };
    return bar(`value ${index + 1}`, share(Math.abs(value)), value > 0, number(value), place);
  });
  return [h("ul", { class: "bars" }, bars), rest > 0 && hint(`and ${count(rest, "more value")}`)];
}

function classes({ label, labels, score }) {
  return labels ? `Classes: ${labels.join(", ") || "none"}` : `Class: ${label}, score ${number(score)}`;
}

/** Return one line about an answer, for screen readers. */
export function summary(model, outputs) {
  const [output] = outputs;
  return {
    classify: () => classes(output),
    regress: () => `Value: ${[output.value].flat().slice(0, 8).map(number).join(", ")}`,
    tag: () => count(output.labels.length, "label"),
    span: () => `Steps ${output.start} to ${output.end}, score ${number(output.score)}`,
    next: () => `Next: ${output.ids.join(", ")}`,
    embed: () => `${count(outputs.length, "vector")} of ${count(output.embedding.length, "number")}`,
    sequence: () => `A vector for each of ${count(output.sequence.length, "step")}`,
  }[model.head.kind]?.() ?? "Answered";
}
