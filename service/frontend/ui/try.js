// Try a model: an editor for its input, and its answer.

import * as api from "./api.js";
import { empty, fill, h, hint } from "./dom.js";
import { continues, forecastRows, STEPS } from "./forecast.js";
import { count } from "./format.js";
import { drawAnswer, headOf, summary } from "./heads.js";
import { createEditor } from "./inputs.js";
import { problem } from "./problem.js";
import { InputError } from "./table.js";

const EMPTY = "The input is empty: this is the answer to a sequence without steps.";

export class TryIt {
  /**
   * elements: form, editors, ahead (a choice), result, status. events: changed(body) or invalid(message) after each edit,
   * answered({stages, elapsed}) or failed() after a request, ended() after each run.
   */
  constructor(elements, events) {
    Object.assign(this, elements, { events, model: null, running: null });
    this.ahead.append(...STEPS.map((steps) => h("option", { value: steps, selected: steps === 12 }, count(steps, "row"))));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.editors.addEventListener("input", () => this.edited());
    this.editors.addEventListener("click", () => this.edited());
    this.editors.addEventListener("pointerup", () => this.edited());
  }

  show(model) {
    this.running?.abort();
    this.model = model;
    const submit = () => this.form.requestSubmit();
    const compared = headOf(model).compares;
    this.inputs = [createEditor(model, 0, submit), ...(compared ? [createEditor(model, 1, submit)] : [])];
    fill(this.editors, this.inputs.map((editor) => editor.element));
    this.ahead.parentElement.hidden = !continues(model);
    this.result.removeAttribute("aria-busy");
    fill(this.result, empty("Run the model to see its answer here."));
    this.status.textContent = "";
    clearTimeout(this.timer);
    this.publish();
  }

  /** Return the first sequence; throws InputError. */
  sequence() {
    return this.inputs[0].value();
  }

  /** Return the body of POST /infer; throws InputError. A second input that is empty is left out. */
  body() {
    const [first, ...others] = this.inputs.map((editor) => editor.value());
    return { model: this.model.name, version: this.model.version, inputs: [first, ...others.filter((input) => input.length)] };
  }

  edited() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.publish(), 150);
  }

  publish() {
    try {
      this.events.changed(this.body());
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      this.events.invalid(error.message);
    }
  }

  async run() {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { model } = this;
    this.result.setAttribute("aria-busy", "true");
    try {
      const body = this.body();
      const answered = await api.infer(body, running.signal);
      const extras = await this.extras(body, answered.reply.outputs, running.signal);
      if (this.running !== running) return;
      const [first] = body.inputs;
      const note = (Array.isArray(first) ? first.length : first.trim()) ? null : hint(EMPTY);
      fill(this.result, note, drawAnswer(model, answered.reply.outputs, body.inputs, extras));
      this.status.textContent = summary(model, answered.reply.outputs);
      this.events.answered(answered);
    } catch (error) {
      if (error.name === "AbortError" || this.running !== running) return;
      if (!(error instanceof InputError || error instanceof api.ApiError)) throw error;
      const shown = error instanceof InputError ? new api.ApiError(error.message, { status: 400 }) : error;
      fill(this.result, problem(shown, () => this.run()));
      this.status.textContent = "";
      this.events.failed();
    } finally {
      if (this.running === running) this.result.removeAttribute("aria-busy");
      this.events.ended();
    }
  }

  /** Return what an answer is drawn with: the tokens that it is about, or the rows that continue a series. */
  async extras(body, outputs, signal) {
    if (continues(this.model) && body.inputs[0].length) {
      return { ahead: await forecastRows(this.model, body, outputs[0], Number(this.ahead.value), signal) };
    }
    const { tokens } = headOf(this.model);
    if (this.model.input.kind !== "text" || !tokens) return {};
    const { inputs, ...model } = body;
    const named = await api.tokens({ ...model, inputs: tokens(outputs, inputs) });
    return { tokens: named.outputs };
  }
}
