// A live stream: the sequence of the editor goes over a WebSocket in chunks, and each answer is drawn as it comes.

import { ApiError, openStream } from "./api.js";
import { empty, fill, h, hint } from "./dom.js";
import { columnNames, count, milliseconds } from "./format.js";
import { drawAnswer, headOf } from "./heads.js";
import { colour, columnLines, legend, linePlot } from "./plot.js";
import { problem } from "./problem.js";

const SHOWN = 160;
const MAX_UNANSWERED = 16;
const MAX_LINES = 6;
const STATUS = { session_lost: 409, session_expired: 404 };
const REASONS = {
  1006: "The connection was lost, or the service refused the stream.",
  1008: "The key of this stream is no longer valid.",
  1012: "The service shuts down.",
};

export class StreamView {
  /** elements: start (a button), size, rate (inputs), unit, status, view. sequence: returns what to send, or throws. */
  constructor(elements, sequence) {
    Object.assign(this, elements, { sequence, model: null, socket: null });
    this.start.addEventListener("click", () => (this.socket ? this.stop("Stopped") : this.begin()));
    this.rate.addEventListener("input", () => this.showRate());
    document.addEventListener("visibilitychange", () => document.hidden && this.stop("Stopped while the page was hidden"));
  }

  show(model) {
    this.stop("");
    this.model = model;
    this.showRate();
    this.unit.textContent = this.isText ? "Words" : "Steps";
    fill(this.view, empty("Start to send the input above in chunks. The session keeps the state of the model between them."));
  }

  showRate() {
    const value = `${this.rate.value} per second`;
    this.rate.setAttribute("aria-valuetext", value);
    this.rate.nextElementSibling.textContent = value;
  }

  begin() {
    let steps;
    try {
      const sequence = this.sequence();
      steps = this.isText ? sequence.split(/\s+/).filter(Boolean) : sequence;
      if (!steps.length) throw new Error("The input above has no steps: enter some first.");
    } catch (error) {
      fill(this.view, problem(new ApiError(error.message, { status: 400 })));
      return;
    }
    Object.assign(this, { steps, at: 0, inputs: [], answers: [], times: [], sentAt: [], chunks: 0 });
    const socket = (this.socket = openStream(this.model));
    socket.onopen = () => this.socket === socket && (this.say("Streaming"), this.send());
    socket.onmessage = (event) => this.socket === socket && this.receive(JSON.parse(event.data));
    socket.onclose = (event) => this.socket === socket && this.closed(event);
    this.start.textContent = "Stop";
    fill(this.view, empty("Connecting…"));
  }

  /** Send the next chunk, and plan the one after it. */
  send() {
    this.timer = setTimeout(() => this.send(), 1000 / Number(this.rate.value));
    if (this.sentAt.length >= MAX_UNANSWERED || this.socket.readyState !== WebSocket.OPEN) return;
    const size = Math.max(1, Math.min(1000, Math.round(Number(this.size.value)) || 1));
    const chunk = Array.from({ length: size }, (_, index) => this.steps[(this.at + index) % this.steps.length]);
    this.at += size;
    this.sentAt.push(performance.now());
    this.inputs = [...this.inputs, ...chunk].slice(-SHOWN);
    this.chunk = chunk;
    this.socket.send(JSON.stringify({ input: this.isText ? chunk.join(" ") : chunk }));
  }

  /** A text goes in chunks of words, each of which may be several steps. */
  get isText() {
    return this.model.input.kind === "text";
  }

  receive(reply) {
    const elapsed = performance.now() - this.sentAt.shift();
    if (reply.error) {
      this.fail(new ApiError(reply.error, { status: STATUS[reply.code] ?? 503, code: reply.code }));
      return;
    }
    this.times = [...this.times, elapsed].slice(-50);
    this.chunks += 1;
    this.answers = [...this.answers, { ...reply.outputs[0], steps: reply.session.steps }].slice(-SHOWN);
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (this.socket) this.draw(reply);
    });
  }

  draw(reply) {
    const median = [...this.times].sort((a, b) => a - b)[Math.floor(this.times.length / 2)];
    const sent = `${count(reply.session.steps, "step")} in ${count(this.chunks, "chunk")}`;
    const facts = h("p", { class: "hint", id: "stream-facts" }, `${sent}, answered in ${milliseconds(median)} (median)`);
    fill(this.view, facts, this.drawInputs(), this.drawAnswers(reply.outputs[0]));
  }

  drawInputs() {
    const columns = this.model.input.features;
    if (!columns) return hint(`… ${this.inputs.slice(-24).join(" ")}`);
    const from = SHOWN - this.inputs.length;
    const lines = columnLines(this.inputs, Math.min(columns, MAX_LINES)).map((line) => ({ ...line, from }));
    const plot = linePlot({ lines, steps: SHOWN, height: 110, label: "The last steps that were sent" });
    return figure("sent", plot, legend(columnNames(this.model).slice(0, MAX_LINES).map((name, index) => [name, colour(index)])));
  }

  /** Answers that are numbers are drawn over time, all others as the newest alone. */
  drawAnswers(output) {
    const names = (headOf(this.model).series?.(this.model, output) ?? []).slice(0, MAX_LINES);
    if (!names.length) return drawAnswer(this.model, [output], [this.chunk]);
    const isClass = Boolean(output.scores);
    const value = (answer, index) => (isClass ? answer.scores[names[index]] : [answer.value].flat()[index]);
    const answers = this.answers.filter((answer) => answer.steps > this.at - SHOWN);
    const at = answers.map((answer) => SHOWN - 1 - (this.at - answer.steps));
    const values = (index) => answers.map((answer) => value(answer, index));
    const lines = names.map((_, index) => ({ values: values(index), at, class: colour(index) }));
    const range = isClass ? [0, 1] : undefined;
    const plot = linePlot({ lines, steps: SHOWN, height: 140, range, label: "The answers to the last chunks" });
    return figure("answered", plot, legend(names.map((name, index) => [name, colour(index)])));
  }

  closed(event) {
    if (event.code === 1000) return this.stop("Ended");
    const reason = event.reason || REASONS[event.code] || `The service closed the stream with code ${event.code}.`;
    return this.fail(new ApiError(reason, { status: 503 }));
  }

  fail(error) {
    this.stop("Interrupted");
    fill(this.view, problem(error, () => this.begin()));
    if (!error.isTemporary) this.view.append(empty("Start again to begin a new session."));
  }

  stop(message) {
    const { socket } = this;
    clearTimeout(this.timer);
    this.socket = null;
    socket?.close();
    this.start.textContent = "Start";
    this.say(message);
  }

  say(message) {
    this.status.textContent = message;
  }
}

const figure = (name, ...content) => h("figure", {}, h("figcaption", { class: "hint" }, name), content);
