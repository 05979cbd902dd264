// The service now: latency by stage, rate, queue, batches and devices, from two successive scrapes of /metrics.

import { metrics } from "./api.js";
import { fill, h, hint, span } from "./dom.js";
import { milliseconds, number, percent } from "./format.js";
import { barPlot, legend } from "./plot.js";
import { problem } from "./problem.js";
import { growth, Scrape } from "./prometheus.js";

const SECONDS = 2;
const SLOTS = 60;
const GROUPS = [
  ["parse", ["parse"], "c0"],
  ["channel", ["channel", "reply"], "c1"],
  ["queue", ["queue", "device_wait"], "c2"],
  ["compute", ["stage_in", "compute", "stage_out"], "c3"],
  ["encode", ["encode"], "c4"],
];

/** Return the values of all plots between two scrapes. A mean without requests is NaN. */
export function measure(before, now) {
  const seconds = now.at - before.at;
  const grown = (name, labels) => growth(before, now, name, labels);
  const mean = (name, labels) => grown(`${name}_sum`, labels) / (grown(`${name}_count`, labels) || NaN);
  const stage = (name) => mean("seqserve_stage_seconds", { stage: name });
  const engines = Math.max(1, now.sum("seqserve_processes", { process: "engine" }));
  const answered = grown("seqserve_requests_total", { outcome: "ok" });
  return {
    stages: GROUPS.map(([, names]) => 1000 * names.map(stage).reduce((sum, value) => sum + (value || 0), 0)),
    latency: 1000 * stage("total"),
    rate: answered / seconds,
    failed: (grown("seqserve_requests_total") - answered) / seconds,
    queue: now.sum("seqserve_queue_depth"),
    batch: mean("seqserve_batch_sequences"),
    limit: now.sum("seqserve_max_batch_sequences"),
    busy: Math.min(1, grown("seqserve_device_busy_seconds_total") / seconds / engines),
    sessions: now.sum("seqserve_sessions"),
  };
}

/** The plots. They stop while the page is hidden. */
export class LivePlots {
  constructor(element) {
    Object.assign(this, { element, before: null, history: [], timer: null });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.resume()));
  }

  start() {
    this.wanted = true;
    this.resume();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.before = null;
  }

  end() {
    this.wanted = false;
    this.stop();
  }

  resume() {
    if (this.wanted && this.timer === null) this.poll();
  }

  async poll() {
    this.timer = setTimeout(() => this.poll(), SECONDS * 1000);
    try {
      const now = new Scrape(await metrics(), performance.now() / 1000);
      if (this.before) this.add(measure(this.before, now));
      else if (!this.history.length) this.draw();
      this.before = now;
    } catch (error) {
      this.before = null;
      fill(this.element, problem(error));
      if (error.status === 401 || error.status === 403) this.end();
    }
  }

  add(values) {
    this.history = [...this.history, values].slice(-SLOTS);
    this.draw();
  }

  draw() {
    const last = this.history.at(-1);
    const list = (pick) => this.history.map(pick);
    const plain = (pick, shade = "c0") => [{ values: list(pick), class: shade }];
    const stages = GROUPS.map(([, , shade], index) => ({ values: list((one) => one.stages[index]), class: shade }));
    const rates = [...plain((one) => one.rate), ...plain((one) => one.failed, "bad")];
    const batch = measured(last, last?.batch, number, "no batch");
    fill(
      this.element,
      tile("Latency", measured(last, last?.latency, milliseconds, "no requests"), stages, "mean, by stage"),
      legend(GROUPS.map(([name, , shade]) => [name, shade])),
      tile("Requests", last ? rateOf(last) : "…", rates, "answered"),
      tile("Queue", measured(last, last?.queue, number), plain((one) => one.queue), "sequences that wait", 1),
      tile("Batch", batch, plain((one) => one.batch), `sequences, at most ${last ? number(last.limit) : "…"}`),
      tile("Device", measured(last, last?.busy, percent), plain((one) => one.busy), "of the time it computes", 0.1),
      hint(`All models, every ${SECONDS} s. Open sessions: ${last ? number(last.sessions) : "…"}.`),
    );
  }
}

/** Return a value as text, or what stands for it before there are values and where there is none. */
const measured = (last, value, format, none = "–") => (!last ? "…" : Number.isFinite(value) ? format(value) : none);
const rateOf = ({ rate, failed }) => `${number(rate)} per s${failed ? `, ${number(failed)} failed` : ""}`;

function tile(name, value, series, note, top) {
  const shown = span(/\d/.test(value) ? "tile-value" : "tile-value none", value);
  const caption = h("figcaption", {}, span("tile-name", name), shown, span("hint", note));
  return h("figure", { class: "tile" }, caption, barPlot({ series, slots: SLOTS, top, label: `${name}: ${value}, ${note}` }));
}
