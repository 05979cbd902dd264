// The page: asks what the caller may use, then connects the list of models, the editor, the code, the stream and the plots.

import * as api from "./api.js";
import { showCard } from "./card.js";
import { CodeTabs } from "./code.js";
import { byId, empty, fill } from "./dom.js";
import { LivePlots } from "./live.js";
import { identified, ModelList, showFacts, summaryOf } from "./models.js";
import { problem } from "./problem.js";
import { StreamView } from "./stream.js";
import { TryIt } from "./try.js";
import { drawWaterfall } from "./waterfall.js";

const READY_SECONDS = 5;
let access = { scopes: [] };
let shown = null;
let isReady = null;

const may = (scope) => access.scopes.includes(scope);
const live = new LivePlots(byId("live-plots"));
const code = new CodeTabs(byId("code-tabs"), byId("code"), byId("copy"), byId("copy-status"));
const list = new ModelList(byId("model-list"), byId("model-search"), byId("model-count"), (model) => choose(model));
const tryIt = new TryIt(
  {
    form: byId("try-form"),
    editors: byId("editors"),
    ahead: byId("ahead"),
    result: byId("result"),
    status: byId("result-status"),
  },
  {
    changed: (body) => code.show(shown, body, access.grpc_port, shown.streams && may("session")),
    invalid: (message) => code.refuse(message),
    failed: () => fill(byId("waterfall"), empty("The last request was not answered, so it has no times.")),
    answered: ({ stages, elapsed }) => drawWaterfall(byId("waterfall"), stages, elapsed),
    ended: () => checkReadiness(),
  },
);
const stream = new StreamView(
  {
    start: byId("stream-start"),
    size: byId("stream-size"),
    rate: byId("stream-rate"),
    unit: byId("stream-unit"),
    status: byId("stream-status"),
    view: byId("stream-view"),
  },
  () => tryIt.sequence(),
);

function choose(model) {
  shown = model;
  list.mark(model);
  history.replaceState(null, "", `#${encodeURIComponent(model.id)}`);
  byId("work").hidden = false;
  byId("model-title").textContent = model.name;
  byId("model-version").textContent = `version ${model.version}`;
  byId("model-description").textContent = model.description ?? "";
  byId("model-summary").textContent = summaryOf(model);
  showFacts(byId("model-facts"), model);
  showCard(byId("card"), byId("card-text"), model);
  tryIt.show(model);
  fill(byId("waterfall"), empty("Run the model to see where the time of the request goes."));
  byId("stream").hidden = !(model.streams && may("session"));
  stream.show(model);
}

async function loadModels() {
  const { models, unavailable } = await api.models();
  const all = identified(models);
  list.show(all, unavailable);
  const wanted = shown?.id ?? decodeURIComponent(location.hash.slice(1));
  const model = all.find((one) => one.id === wanted) ?? all.find((one) => one.name === wanted) ?? all[0];
  byId("work").hidden = !model;
  if (!model) return;
  if (JSON.stringify(model) !== JSON.stringify(shown)) choose(model);
}

/** Show what the caller may use. */
async function begin() {
  fill(byId("start-problem"));
  try {
    access = await api.access();
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else fill(byId("start-problem"), problem(error, begin));
    return;
  }
  byId("version").textContent = access.version;
  if (access.needs_key) return askForKey();
  byId("ask-key").hidden = true;
  byId("caller").textContent = api.key.get() ? `key ${access.caller}` : "";
  byId("forget-key").hidden = !api.key.get();
  byId("models").hidden = !may("infer");
  byId("live").hidden = !may("metrics");
  byId("layout").hidden = false;
  byId("nothing").hidden = may("infer") || may("metrics");
  if (may("metrics")) live.start();
  if (may("infer")) await loadModels().catch((error) => fill(byId("start-problem"), problem(error, begin)));
}

function askForKey(error = null) {
  live.end();
  stream.stop("");
  shown = null;
  api.key.forget();
  byId("layout").hidden = true;
  byId("ask-key").hidden = false;
  byId("caller").textContent = "";
  byId("forget-key").hidden = true;
  const refusal = "This service has no such key. Check that it is complete.";
  fill(byId("key-problem"), error ? problem(new api.ApiError(refusal, error)) : []);
  byId("key").value = "";
  byId("key").focus();
}

async function checkReadiness() {
  const before = isReady;
  isReady = await api.ready();
  const state = { true: ["ready", "ready"], false: ["not ready", "waiting"], null: ["no answer", "down"] }[isReady];
  byId("ready").textContent = state[0];
  byId("ready").className = `status ${state[1]}`;
  if (isReady && before === false && may("infer")) loadModels().catch(() => {});
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key.set(byId("key").value.trim());
  begin();
});
byId("forget-key").addEventListener("click", () => askForKey());
addEventListener("hashchange", () => {
  const model = list.models.find((one) => one.id === decodeURIComponent(location.hash.slice(1)));
  if (model && model.id !== shown?.id) choose(model);
});
begin();
checkReadiness();
setInterval(checkReadiness, READY_SECONDS * 1000);
