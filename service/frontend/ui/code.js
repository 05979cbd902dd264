// The request of the page as code to copy: curl, Python's standard library, and Triton's clients over HTTP and gRPC.

import { key } from "./api.js";
import { button, fill, h } from "./dom.js";

const OUTPUTS = {
  classify: "label",
  regress: "value",
  tag: "labels",
  span: "start",
  next: "ids",
  embed: "embedding",
  sequence: "sequence",
};
const VARIABLE = "SEQSERVE_CLIENT_KEY";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const authorised = () => key.get() !== null;

function curl({ origin, body }) {
  const header = authorised() ? ` \\\n     -H "Authorization: Bearer $${VARIABLE}"` : "";
  return `curl -s ${origin}/infer -H 'Content-Type: application/json'${header} \\\n     -d ${quoted(JSON.stringify(body))}`;
}

function python({ origin, body }) {
  const header = authorised() ? `, "Authorization": "Bearer " + os.environ["${VARIABLE}"]` : "";
  return `import json
${authorised() ? "import os\n" : ""}import urllib.request

request = urllib.request.Request(
    "${origin}/infer",
    json.dumps(${JSON.stringify(body)}).encode(),
    {"Content-Type": "application/json"${header}},
)
with urllib.request.urlopen(request) as reply:
    print(json.load(reply)["outputs"])
`;
}

/** Return the lines that build the tensors of an Open Inference Protocol request. Sequences of any length lie end to end. */
function tensors({ model, body }) {
  const { kind, features } = model.input;
  const { inputs } = body;
  if (kind === "text") {
    const texts = inputs.map((text) => `${JSON.stringify(text)}.encode()`).join(", ");
    return `inputs = [triton.InferInput("text", [${inputs.length}], "BYTES")]
inputs[0].set_data_from_numpy(np.array([${texts}], dtype=object))`;
  }
  const [name, type, array] = kind === "ids" ? ["ids", "INT32", "np.int32"] : ["inputs", "FP32", "np.float32"];
  const steps = inputs.map((input) => input.length);
  const total = steps.reduce((sum, length) => sum + length, 0);
  const shape = [1, total, ...(features ? [features] : [])];
  const values = `values = np.array(${JSON.stringify(inputs.flat())}, ${array})
inputs = [triton.InferInput("${name}", [${shape.join(", ")}], "${type}")]
inputs[0].set_data_from_numpy(values.reshape(${shape.join(", ")}))`;
  if (inputs.length === 1) return values;
  const offsets = steps.reduce((ends, length) => [...ends, ends.at(-1) + length], [0]);
  return `${values}
inputs.append(triton.InferInput("offsets", [1, ${offsets.length}], "INT32"))
inputs[1].set_data_from_numpy(np.array([${JSON.stringify(offsets)}], np.int32))`;
}

function triton(request, transport, address) {
  const { model, secure } = request;
  const header = transport === "grpc" ? "authorization" : "Authorization"; // gRPC has lower-case names alone
  const headers = authorised() ? `, headers={"${header}": "Bearer " + os.environ["${VARIABLE}"]}` : "";
  return `${authorised() ? "import os\n\n" : ""}import numpy as np
import tritonclient.${transport} as triton

${tensors(request)}
with triton.InferenceServerClient("${address}"${secure ? ", ssl=True" : ""}) as client:
    reply = client.infer("${model.name}", inputs, model_version="${model.version}"${headers})
    print(reply.as_numpy("${OUTPUTS[model.head.kind]}"))
`;
}

/** Return the program for each language; null where the service has no such port. */
export function programs(model, body, grpcPort) {
  const request = { model, body, origin: location.origin, secure: location.protocol === "https:" };
  const grpc = grpcPort && `${location.hostname}:${grpcPort}`;
  return {
    curl: curl(request),
    Python: python(request),
    tritonclient: triton(request, "http", location.host),
    gRPC: grpc ? triton(request, "grpc", grpc) : null,
  };
}

/** The tabs with the programs. */
export class CodeTabs {
  constructor(tabs, panel, copy, status) {
    Object.assign(this, { tabs, panel, status, programs: {}, chosen: "curl" });
    copy.addEventListener("click", () => this.copy());
    tabs.addEventListener("keydown", (event) => this.move(event));
  }

  show(model, body, grpcPort) {
    this.programs = Object.fromEntries(Object.entries(programs(model, body, grpcPort)).filter(([, text]) => text));
    if (!(this.chosen in this.programs)) this.chosen = "curl";
    const names = Object.keys(this.programs);
    if (names.join() !== [...this.tabs.children].map((tab) => tab.textContent).join()) {
      const attributes = (name) => ({ role: "tab", id: `tab-${name}`, "aria-controls": this.panel.id });
      fill(this.tabs, names.map((name) => button(name, () => this.choose(name), attributes(name))));
    }
    this.choose(this.chosen);
  }

  choose(name) {
    this.chosen = name;
    for (const tab of this.tabs.children) {
      tab.setAttribute("aria-selected", tab.textContent === name);
      tab.tabIndex = tab.textContent === name ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${name}`);
    this.panel.textContent = this.programs[name].trimEnd();
    this.status.textContent = "";
  }

  move(event) {
    const tabs = [...this.tabs.children];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    this.choose(next.textContent);
    next.focus();
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.panel.textContent);
      this.status.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.panel); // without permission, or without TLS on another host
      this.status.textContent = "Selected: copy it with the keyboard";
    }
  }
}
