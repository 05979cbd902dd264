// The pad on which a series is drawn: a plot of the rows that a pointer changes. The text field does the same with a keyboard.

import { fill, h } from "./dom.js";
import { columnLines, EDGE, linePlot, rangeOf } from "./plot.js";

const HEIGHT = 160;

/** A plot of rows. names: of their columns. changed: called with the rows after each stroke. */
export class DrawingPad {
  constructor(names, changed) {
    Object.assign(this, { columns: names.length, changed, rows: [], column: 0, last: null, range: null });
    this.figure = h("div", { class: "pad" });
    this.choice = h("select", { "aria-label": "Series to draw", onchange: () => (this.column = Number(this.choice.value)) });
    this.choice.append(...names.map((name, index) => h("option", { value: index }, name)));
    this.figure.addEventListener("pointerdown", (event) => this.begin(event));
    this.figure.addEventListener("pointermove", (event) => this.last && this.stroke(event));
    for (const end of ["pointerup", "pointercancel"]) this.figure.addEventListener(end, () => this.end());
  }

  show(rows) {
    this.rows = rows;
    const lines = columnLines(rows, this.columns);
    const [low, high] = this.range ?? rangeOf(lines.map((line) => line.values));
    const range = this.range ?? [low - 0.1 * (high - low), high + 0.1 * (high - low)];
    this.shown = range;
    const label = `The input: ${this.columns} series over ${rows.length} steps`;
    fill(this.figure, linePlot({ lines, steps: rows.length, height: HEIGHT, range, label }));
  }

  begin(event) {
    if (!this.rows.length) return;
    this.range = this.shown; // the scale stays while a stroke is drawn
    this.figure.setPointerCapture(event.pointerId);
    this.last = this.position(event);
    this.stroke(event);
  }

  /** Set the value of every step between the last position and this one. */
  stroke(event) {
    const [from, to] = [this.last, this.position(event)];
    const rows = this.rows.map((row) => [...row]);
    const step = Math.sign(to.step - from.step) || 1;
    for (let at = from.step; at !== to.step + step; at += step) {
      const share = to.step === from.step ? 1 : (at - from.step) / (to.step - from.step);
      rows[at][this.column] = from.value + share * (to.value - from.value);
    }
    this.last = to;
    this.show(rows);
  }

  end() {
    if (!this.last) return;
    this.last = this.range = null;
    this.changed(this.rows);
  }

  position(event) {
    const box = this.figure.querySelector("svg").getBoundingClientRect();
    const last = this.rows.length - 1;
    const step = Math.min(last, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * last)));
    const [low, high] = this.shown;
    const share = (event.clientY - box.top - EDGE) / (box.height - 2 * EDGE);
    return { step, value: Math.min(high, Math.max(low, high - share * (high - low))) };
  }
}
