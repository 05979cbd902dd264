// The list of served models, and the facts about the chosen one.

import { button, empty, fill, h, span } from "./dom.js";
import { bytes, count, listed } from "./format.js";
import { headOf } from "./heads.js";

const INPUTS = { text: "text", ids: "token ids", features: "numbers" };

/** Return the models of GET /models with an id each, newest version of a name first. */
export function identified(models) {
  const all = models.map((model) => ({ ...model, id: `${model.name}/${model.version}` }));
  const sorted = all.reverse().sort((a, b) => a.name.localeCompare(b.name));
  return sorted.map((model, index) => ({ ...model, newest: model.name !== sorted[index - 1]?.name }));
}

function answerOf(model) {
  if (model.head.multi_label) return "several classes";
  return model.head.outputs > 1 ? "values" : headOf(model).answers;
}

/** The list with its search field. choose: called with the model that the user picks. */
export class ModelList {
  constructor(list, search, status, choose) {
    Object.assign(this, { list, search, status, choose, models: [], unavailable: [], chosen: null });
    search.addEventListener("input", () => this.draw());
    list.addEventListener("keydown", (event) => this.move(event));
  }

  show(models, unavailable) {
    Object.assign(this, { models, unavailable });
    this.search.hidden = models.length + unavailable.length < 8;
    this.draw();
  }

  mark(model) {
    this.chosen = model?.id ?? null;
    for (const item of this.list.querySelectorAll("button")) {
      if (item.dataset.id === this.chosen) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
    }
  }

  draw() {
    const wanted = this.search.hidden ? "" : this.search.value.trim().toLowerCase();
    const texts = (model) => [model.name, model.description, ...(model.aliases ?? [])];
    const fits = (model) => texts(model).some((text) => text?.toLowerCase().includes(wanted));
    const found = this.models.filter(fits);
    const broken = this.unavailable.filter(fits);
    const items = [...found.map((model) => this.item(model)), ...broken.map(brokenItem)];
    const none = wanted ? "No model has this in its name." : "No model is served. Put one into the models folder.";
    fill(this.list, items.length ? items : h("li", {}, empty(none)));
    const all = count(this.models.length, "model");
    this.status.textContent = wanted ? `${found.length} of ${all}` : all;
    this.mark(this.models.find((model) => model.id === this.chosen));
  }

  item(model) {
    const does = `${INPUTS[model.input.kind]} → ${answerOf(model)}`;
    const notes = [does, !model.ready && "loading", model.streams && "streams"].filter(Boolean);
    const versions = this.models.filter((other) => other.name === model.name).length;
    const name = nameOf(model.name, versions > 1 && model.version);
    const label = [name, span("model-note", notes.join(" · "))];
    return h("li", {}, button(label, () => this.choose(model), { "data-id": model.id }));
  }

  /** Move the focus with the arrow keys. */
  move(event) {
    const items = [...this.list.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const ends = { Home: 0, End: items.length - 1 };
    const next = step ? items.indexOf(document.activeElement) + step : ends[event.key];
    if (next === undefined || !items[next]) return;
    event.preventDefault();
    items[next].focus();
  }
}

const nameOf = (name, version) => span("model-name", name, version && span("version", ` v${version}`));

function brokenItem({ name, version, reason }) {
  return h("li", { class: "broken" }, nameOf(name, version), span("model-note", `cannot be served: ${reason}`));
}

/** Return one line: what a model is made of and where it runs. */
export function summaryOf(model) {
  const kinds = model.layers.map(({ kind }) => kind.replaceAll("_", " ")).join(" → ");
  const place = model.device ? `on ${model.device}` : "not loaded yet";
  const size = `${model.precision}, ${bytes(model.weight_bytes)}`;
  return [kinds, size, place, model.streams ? "takes streams" : "whole sequences only"].join(" · ");
}

/** Show what a model takes, computes and answers. */
export function showFacts(list, model) {
  const facts = [
    ["Input", inputOf(model)],
    ["Answer", answer(model)],
    ["Layers", model.layers.map(layer).join(" → ")],
    ["Kernels", kernels(model)],
    ["Precision", `${model.precision} weights, ${bytes(model.weight_bytes)}`],
    ["Device", model.device ?? "not loaded"],
    ["Sessions", model.streams ? "yes: a sequence may arrive in chunks" : "no: it needs whole sequences"],
    ["Other names", model.aliases.join(", ")],
  ];
  fill(list, facts.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function inputOf({ input, min_steps: least }) {
  const kinds = {
    text: "text",
    ids: `token ids below ${input.vocabulary}`,
    features: `rows of ${count(input.features, "number")}${input.names ? ` (${listed(input.names)})` : ""}`,
  };
  return `${kinds[input.kind]}, ${least > 1 ? `${least} to ` : "up to "}${input.max_steps} steps`;
}

function answer(model) {
  const { labels, outputs, multi_label: several } = model.head;
  if (!labels) return outputs > 1 ? count(outputs, "value") : answerOf(model);
  return `${several ? "any" : "one"} of ${labels.length} ${headOf(model).labels}: ${listed(labels)}`;
}

function layer({ kind, ...values }) {
  const size = values.hidden ?? values.filters ?? values.width ?? "";
  const levels = values.depth ?? values.levels ?? 1;
  const window = values.filters ? (values.widths?.join(", ") ?? values.width) : null;
  const all = [window && `width ${window}`, levels > 1 && `${levels} levels`, values.bidirectional && "both directions"];
  const notes = all.filter(Boolean);
  return `${kind.replaceAll("_", " ")} ${size}`.trim() + (notes.length ? ` (${notes.join(", ")})` : "");
}

function kernels({ backends, layers }) {
  const name = (whole, index) => layers[index]?.kind.replaceAll("_", " ") ?? whole;
  return backends.map((entry) => entry.replace(/^layers\.(\d+)/, name)).join(", ");
}
