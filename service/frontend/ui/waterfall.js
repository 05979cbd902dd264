// Where the time of the last request went: a bar for each stage, each beginning where the one before ends.

import { empty, fill, h, headline, hint, span } from "./dom.js";
import { milliseconds } from "./format.js";

const NAMES = {
  parse: ["parse", "read, validate and tokenise"],
  channel: ["channel", "to the engine"],
  queue: ["queue", "wait for a batch"],
  stage_in: ["stage in", "pack the batch"],
  device_wait: ["device wait", "wait for the device"],
  compute: ["compute", "run the layers"],
  stage_out: ["stage out", "split the results"],
  reply: ["reply", "back to the frontend"],
  encode: ["encode", "write the answer"],
};

/** Draw the stages of a request. elapsed: its milliseconds as the browser saw it. */
export function drawWaterfall(element, stages, elapsed) {
  const total = stages.find(([name]) => name === "total")?.[1];
  if (!total) return fill(element, empty("The service did not report the stages of this request."));
  const inside = stages.filter(([name]) => name in NAMES);
  const rest = Math.max(0, total - inside.reduce((sum, [, duration]) => sum + duration, 0));
  const rows = [...inside.map(([name, duration]) => [...NAMES[name], duration]), ["other", "between the stages", rest]];
  let begin = 0;
  const bars = rows.map(([name, meaning, duration]) => {
    const row = bar(name, meaning, begin / total, duration / total, duration);
    begin += duration;
    return row;
  });
  const outside = Math.max(0, elapsed - total);
  return fill(
    element,
    headline("in the service", milliseconds(total)),
    h("ol", { class: "waterfall" }, bars),
    hint(`and ${milliseconds(outside)} in the network and the browser`),
  );
}

function bar(name, meaning, begin, share, duration) {
  const line = h("span", { class: "span", "aria-hidden": "true" });
  line.style.setProperty("--begin", begin);
  line.style.setProperty("--share", share);
  return h("li", { title: meaning }, span("stage", name), span("lane", line), span("bar-value", milliseconds(duration)));
}
