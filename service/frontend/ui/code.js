// The request of the page as code to copy: curl, Python's standard library, and Triton's clients over HTTP and gRPC; the same input as a
// stream. The newest version of a model is not named, so that the code goes on with the next one.

import { key } from "./api.js";
import { button, fill, h } from "./dom.js";
import { headOf } from "./heads.js";

const VARIABLE = "SEQSERVE_CLIENT_KEY";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const authorised = () => key.get() !== null;
const importOs = () => (authorised() ? "import os\n" : "");
const headers = (argument, name = "Authorization") =>
  authorised() ? `, ${argument}={"${name}": "Bearer " + os.environ["${VARIABLE}"]}` : "";

function curl({ origin, body }) {
  const header = authorised() ? ` \\\n     -H "Authorization: Bearer $${VARIABLE}"` : "";
  return `curl -s ${origin}/infer -H 'Content-Type: application/json'${header} \\\n     -d ${quoted(JSON.stringify(body))}`;
}

/** Return requests that send a sequence to a session, its last step in another chunk. */
function session({ origin, body, steps, join }) {
  const chunks = [steps.slice(0, -1), steps.slice(-1)].filter((chunk) => chunk.length);
  const send = (chunk, index) => ({ ...body, inputs: [join(chunk)], session: "my-session", end: index === chunks.length - 1 });
  return chunks.map((chunk, index) => curl({ origin, body: send(chunk, index) })).join("\n");
}

/** Return a program that sends a sequence over a WebSocket, a step in a message. */
function websocket({ origin, body, steps, join }) {
  const { inputs, ...query } = body;
  return `import json
${importOs()}
from websockets.sync.client import connect  # pip install websockets

with connect("${origin.replace("http", "ws")}/stream?${new URLSearchParams(query)}"${headers("additional_headers")}) as stream:
    for step in ${JSON.stringify(steps.map((step) => join([step])))}:
        stream.send(json.dumps({"input": step}))
        print(json.loads(stream.recv()))
`;
}

function python({ origin, body }) {
  const header = authorised() ? `, "Authorization": "Bearer " + os.environ["${VARIABLE}"]` : "";
  return `import json
${importOs()}import urllib.request

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
  const { model, body, secure } = request;
  const sent = headers("headers", transport === "grpc" ? "authorization" : "Authorization"); // gRPC has lower-case names alone
  return `${importOs()}import numpy as np
import tritonclient.${transport} as triton

${tensors(request)}
with triton.InferenceServerClient("${address}"${secure ? ", ssl=True" : ""}) as client:
    reply = client.infer("${model.name}", inputs${body.version ? `, model_version="${body.version}"` : ""}${sent})
    print(reply.as_numpy("${headOf(model).tensor}"))
`;
}

/** Return the program for each language; null where the service has no such port, or the caller no streams of this model. */
export function programs(model, { version, ...unpinned }, grpcPort, streams) {
  const body = model.newest ? unpinned : { version, ...unpinned };
  const [first] = body.inputs;
  const isText = model.input.kind === "text";
  const [steps, join] = isText ? [first.split(/\s+/).filter(Boolean), (words) => words.join(" ")] : [first, (chunk) => chunk];
  const request = { model, body, steps, join, origin: location.origin, secure: location.protocol === "https:" };
  const grpc = grpcPort && `${location.hostname}:${grpcPort}`;
  return {
    curl: curl(request),
    Python: python(request),
    tritonclient: triton(request, "http", location.host),
    gRPC: grpc ? triton(request, "grpc", grpc) : null,
    Session: streams && steps.length ? session(request) : null,
    WebSocket: streams && steps.length ? websocket(request) : null,
  };
}

/** The tabs with the programs. */
export class CodeTabs {
  constructor(tabs, panel, copy, status) {
    Object.assign(this, { tabs, panel, button: copy, status, programs: {}, chosen: "curl" });
    copy.addEventListener("click", () => this.copy());
    tabs.addEventListener("keydown", (event) => this.move(event));
  }

  show(...request) {
    this.programs = Object.fromEntries(Object.entries(programs(...request)).filter(([, text]) => text));
    this.button.disabled = false;
    if (!(this.chosen in this.programs)) this.chosen = "curl";
    const names = Object.keys(this.programs);
    if (names.join() !== [...this.tabs.children].map((tab) => tab.textContent).join()) {
      const attributes = (name) => ({ role: "tab", id: `tab-${name}`, "aria-controls": this.panel.id });
      fill(this.tabs, names.map((name) => button(name, () => this.choose(name), attributes(name))));
    }
    this.choose(this.chosen);
  }

  /** Show why there is no code: the input is not valid. */
  refuse(message) {
    for (const name of Object.keys(this.programs)) this.programs[name] = `The input above is not valid. ${message}`;
    this.button.disabled = true;
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
