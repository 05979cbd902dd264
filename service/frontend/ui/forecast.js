// The answer of a model that continues its series: it answers as many values as a row has.

import * as api from "./api.js";
import { h, hint, span, swatch } from "./dom.js";
import { count, number } from "./format.js";
import { colour, columnLines, linePlot } from "./plot.js";

const MAX_SERIES = 24;
export const STEPS = [1, 12, 24];

/** Return whether the answers of a model are next rows. */
export function continues({ head, input }) {
  return head.kind === "regress" && input.kind === "features" && head.outputs === input.features && head.outputs <= MAX_SERIES;
}

/** Return the rows that follow: each answer is the last row of the next request. first: the answer to the body. */
export async function forecastRows(model, body, first, steps, signal) {
  const ahead = [[first.value].flat()];
  while (ahead.length < steps && ahead.at(-1).every(Number.isFinite)) {
    const rows = [...body.inputs[0], ...ahead].slice(-model.input.max_steps);
    const { reply } = await api.infer({ ...body, inputs: [rows] }, signal);
    ahead.push([reply.outputs[0].value].flat());
  }
  return ahead;
}

/** Return the plot of rows and of those that follow, with the values of the first that follows. names: of the columns, if known. */
export function forecast(rows, ahead, names) {
  const series = rows.at(-1).map((_, index) => index);
  const known = columnLines(rows, series.length);
  const joined = columnLines([rows.at(-1), ...ahead], series.length);
  const next = joined.map((line) => ({ ...line, from: rows.length - 1, class: `${line.class} dashed` }));
  const marks = series.map((index) => ({ step: rows.length, value: ahead[0][index], class: colour(index) }));
  const first = ahead[0].map(number);
  const sizes = `The ${count(rows.length, "row")} of the input and ${count(ahead.length, "row")} that the model adds`;
  const label = `${sizes}; the first: ${first.join(", ")}`;
  return [
    linePlot({ lines: [...known, ...next], marks, steps: rows.length + ahead.length, label, height: 210 }),
    hint(ahead.length > 1 ? "The next row, and further rows, each from the forecasts before it:" : "The next row:"),
    h("ul", { class: "values" }, series.map((index) => h("li", {}, swatch(colour(index)), names && span("hint", names[index]), first[index]))),
  ];
}
