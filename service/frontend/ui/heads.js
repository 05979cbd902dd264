// Each kind of head, and how its answer is drawn and said.

import { bar, classBars } from "./classes.js";
import { empty, h, headline, hint } from "./dom.js";
import { continues, forecast } from "./forecast.js";
import { columnNames, count, number } from "./format.js";
import { candidates, spanOf, tagged } from "./steps.js";
import { comparison, heatmap } from "./vectors.js";

const MAX_VALUES = 24;
const NOT_FINITE = "The answer has values that are no finite numbers: this input is outside of what the model can compute.";

/**
 * What the page shows of each kind of head. answers: in the list of models; labels: what it chooses among; tensor: its main output in the
 * Open Inference Protocol; draw(model, outputs, sent, extras): the elements of an answer; say(outputs): one line about it; tokens(outputs,
 * inputs): the ids or texts whose tokens an answer is about; series(model, output): the names of numbers that are drawn over time;
 * compares: whether a second input is compared with the first.
 */
const HEADS = {
  classify: {
    answers: "one class",
    labels: "classes",
    tensor: "label",
    draw: ({ head }, [output]) => classBars(head, output),
    say: ([{ label, labels, score }]) => (labels ? `Classes: ${labels.join(", ") || "none"}` : `Class: ${label}, score ${number(score)}`),
    series: ({ head }) => head.labels,
  },
  regress: {
    answers: "a value",
    tensor: "value",
    draw: (model, [output], [sequence], { ahead }) => regression(model, output, sequence, ahead),
    say: ([{ value }]) => `Value: ${[value].flat().slice(0, 8).map(number).join(", ")}`,
    series: (model, { value }) => (continues(model) ? columnNames(model) : [value].flat().map((_, index) => `value ${index + 1}`)),
  },
  tag: {
    answers: "a label per token",
    labels: "labels for each token",
    tensor: "labels",
    draw: (model, [output], [sequence], { tokens }) => tagged(model.head, output, stepsOf(model, sequence, tokens?.[0])),
    say: ([{ labels }]) => count(labels.length, "label"),
    tokens: (_, inputs) => inputs,
  },
  span: {
    answers: "a span",
    tensor: "start",
    draw: (model, [output], [sequence], { tokens }) => spanOf(output, stepsOf(model, sequence, tokens?.[0])),
    say: ([{ start, end, score }]) => `Steps ${start} to ${end}, score ${number(score)}`,
    tokens: (_, inputs) => inputs,
  },
  next: {
    answers: "the next token",
    tensor: "ids",
    draw: (_, [output], sent, { tokens }) => candidates(output, tokens?.[0]),
    say: ([{ ids }]) => `Next: ${ids.join(", ")}`,
    tokens: (outputs) => outputs.map((output) => output.ids),
  },
  embed: {
    answers: "a vector",
    tensor: "embedding",
    draw: (_, outputs) => comparison(outputs.map((one) => one.embedding)),
    say: (outputs) => `${count(outputs.length, "vector")} of ${count(outputs[0].embedding.length, "number")}`,
    compares: true,
  },
  sequence: {
    answers: "a vector per step",
    tensor: "sequence",
    draw: (_, [output]) => heatmap(output.sequence),
    say: ([{ sequence }]) => `A vector for each of ${count(sequence.length, "step")}`,
  },
};
const ANY_HEAD = {
  answers: "an answer",
  draw: (_, [output]) => h("pre", { tabindex: "0" }, JSON.stringify(output, null, 2)),
  say: () => "Answered",
};

/** Return what the page shows of the head of a model. */
export const headOf = (model) => HEADS[model.head.kind] ?? ANY_HEAD;

/** Return the elements of an answer. sent: the sequences; tokens: of each text, from POST /tokens; ahead: forecast rows. */
export const drawAnswer = (model, outputs, sent, extras = {}) => headOf(model).draw(model, outputs, sent, extras);

/** Return one line about an answer, for screen readers. */
export const summary = (model, outputs) => headOf(model).say(outputs);

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
