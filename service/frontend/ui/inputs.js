// The input of a model: a text, token ids, or rows of numbers. An editor has an element and `value()`, which throws InputError.

import { DrawingPad } from "./draw.js";
import { button, h } from "./dom.js";
import { columnNames, count, listed } from "./format.js";
import { formatRows, InputError, parseIds, parseRows } from "./table.js";

const TEXTS = ["This is a text.", "This is another text."];
const SAMPLE_STEPS = 48;
const MAX_FILE_BYTES = 4e6;

/** Return the editor for a model's input. which: 0 for the first input, 1 for the one that it is compared with. */
export function createEditor(model, which, submit) {
  const label = which ? "Second input" : { text: "Text", ids: "Token ids", features: "Rows of numbers" }[model.input.kind];
  return { text: textEditor, ids: idsEditor, features: featuresEditor }[model.input.kind](model, which, label, submit);
}

function field(label, rows, value, submit, hint) {
  const id = `input-${label.replaceAll(" ", "-").toLowerCase()}`;
  const area = h("textarea", { id, rows, spellcheck: "false", autocomplete: "off", value });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  const note = h("span", { class: "hint" }, hint);
  return { area, note, head: h("div", { class: "field-head" }, h("label", { for: id }, label), note) };
}

function textEditor(model, which, label, submit) {
  const { area, head } = field(label, 3, (!which && model.input.example) || TEXTS[which], submit, "");
  return { element: h("div", { class: "editor" }, head, area), value: () => area.value };
}

function idsEditor(model, which, label, submit) {
  const size = model.input.vocabulary;
  const length = Math.min(12, model.input.max_steps);
  const sample = () => Array.from({ length }, () => Math.floor(Math.random() * size)).join(", ");
  const { area, head } = field(label, 3, sample(), submit, `0 to ${size - 1}`);
  const tools = h("div", { class: "tools" }, button("Random ids", () => (area.value = sample())));
  return { element: h("div", { class: "editor" }, head, area, tools), value: () => parseIds(area.value, size) };
}

function featuresEditor(model, which, label, submit) {
  const columns = model.input.features;
  const { area, note, head } = field(label, 6, formatRows(wave(columns, sampleSteps(model), which)), submit, "");
  area.classList.add("numbers");
  const { names } = model.input;
  const pad = new DrawingPad(columnNames(model), (rows) => (area.value = formatRows(rows)));
  const value = () => parseRows(area.value, columns, names);
  const draw = () => {
    try {
      const rows = value();
      pad.show(rows);
      note.textContent = rows.length ? `${count(rows.length, "step")} of ${names ? listed(names) : count(columns, "number")}` : "no steps";
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      pad.show([]);
      note.textContent = error.message;
    }
  };
  area.addEventListener("input", draw);
  const replace = (text) => {
    area.value = text;
    draw();
  };
  const file = h("input", {
    type: "file",
    accept: ".csv,.tsv,.txt,.json,text/csv",
    class: "visually-hidden",
    "aria-label": "CSV file with rows of numbers",
  });
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    const limit = `${MAX_FILE_BYTES / 1e6} MB`;
    if (chosen?.size > MAX_FILE_BYTES) note.textContent = `The file is larger than ${limit}: choose a smaller one.`;
    else if (chosen) replace(await chosen.text());
    file.value = "";
  });
  const tools = h(
    "div",
    { class: "tools" },
    columns > 1 && pad.choice,
    h("label", { class: "button" }, "Open CSV…", file),
    button("Sample", () => replace(formatRows(wave(columns, sampleSteps(model), which, Math.random() * 6)))),
    h("span", { class: "hint" }, "Draw on the plot, or edit the rows."),
  );
  draw();
  return { element: h("div", { class: "editor" }, head, pad.figure, tools, area), value };
}

const sampleSteps = (model) => Math.max(model.min_steps, Math.min(SAMPLE_STEPS, model.input.max_steps));

/** Return rows of waves, a different one in each column. */
function wave(columns, steps, which, phase = 0) {
  return Array.from({ length: steps }, (_, step) =>
    Array.from({ length: columns }, (_, column) => {
      const period = 12 + 5 * (column % 5) + 3 * which;
      const size = 1 - 0.12 * (column % 4);
      return size * Math.sin((2 * Math.PI * step) / period + column + phase) + 0.05 * Math.sin(step * 2.7 + column);
    }),
  );
}
