// Try a model: an editor for its input, and its answer.

import * as api from "./api.js";
import { empty, fill, h } from "./dom.js";
import { createEditor } from "./inputs.js";
import { problem } from "./problem.js";
import { drawAnswer, summary } from "./results.js";
import { InputError } from "./table.js";

export class TryIt {
  /** elements: form, editors, result, status. events: changed(body) after each edit, answered({stages, elapsed}) after each answer. */
  constructor(elements, events) {
    Object.assign(this, elements, { events, model: null, running: null });
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
    const compared = model.head.kind === "embed";
    this.inputs = [createEditor(model, 0, submit), ...(compared ? [createEditor(model, 1, submit)] : [])];
    fill(this.editors, this.inputs.map((editor) => editor.element));
    this.result.removeAttribute("aria-busy");
    fill(this.result, empty("Run the model to see its answer here."));
    this.status.textContent = "";
    this.edited();
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
    this.timer = setTimeout(() => {
      try {
        this.events.changed(this.body());
      } catch (error) {
        if (!(error instanceof InputError)) throw error; // the code keeps the last valid input
      }
    }, 150);
  }

  async run() {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { model } = this;
    this.result.setAttribute("aria-busy", "true");
    try {
      const body = this.body();
      const answered = await api.infer(body, running.signal);
      const tokens = await this.tokens(body, answered.reply.outputs);
      if (this.running !== running) return;
      fill(this.result, drawAnswer(model, answered.reply.outputs, body.inputs, tokens));
      this.status.textContent = summary(model, answered.reply.outputs);
      this.events.answered(answered);
    } catch (error) {
      if (error.name === "AbortError" || this.running !== running) return;
      const shown = error instanceof InputError ? new api.ApiError(error.message, { status: 400 }) : error;
      fill(this.result, shown instanceof api.ApiError ? problem(shown, () => this.run()) : h("p", { class: "problem" }, String(shown)));
      this.status.textContent = "";
    } finally {
      if (this.running === running) this.result.removeAttribute("aria-busy");
    }
  }

  /** Return the tokens that the answer is about, null if the model has no text. */
  async tokens({ model, version, inputs }, outputs) {
    const { input, head } = this.model;
    if (input.kind !== "text" || !["tag", "span", "next"].includes(head.kind)) return null;
    const asked = head.kind === "next" ? outputs.map((output) => output.ids) : inputs;
    return (await api.tokens({ model, version, inputs: asked })).outputs;
  }
}
