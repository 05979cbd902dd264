// The service's public API: every request of this page passes here, with the key if there is one.

const KEY = "seqserve.key";
const RETRIED = new Set([429, 503]);

/** An error that the service answered with, or the failure to reach it. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", field = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, field, retryAfter });
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return this.status === 0 || RETRIED.has(this.status);
  }
}

// The key stays in this tab, and is gone when the tab closes.
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Return the response to a request; throws ApiError for every other status than 200. */
async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const token = key.get();
  const all = { ...headers };
  if (token) all.authorization = `Bearer ${token}`;
  if (body) all["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers: all, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The service does not answer. It may be restarting.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const seconds = Number(response.headers.get("retry-after"));
  const retryAfter = seconds > 0 ? seconds : null;
  const body = await response.json().catch(() => ({}));
  return new ApiError(body.error ?? `The service answered with status ${response.status}.`, {
    status: response.status,
    code: body.code ?? "",
    field: body.field ?? null,
    retryAfter,
  });
}

export const access = async () => (await send("/access")).json();
export const models = async () => (await send("/models")).json();
export const metrics = async () => (await send("/metrics")).text();
export const tokens = async (body) => (await send("/tokens", { method: "POST", body })).json();

export async function card({ name, version }) {
  return (await send(`/models/${encodeURIComponent(name)}/card?version=${version}`)).text();
}

/** Return whether the service is ready, null if it does not answer. */
export const ready = () => send("/readyz").then(() => true, (error) => (error.status ? false : null));

/** Return the reply of POST /infer with the milliseconds of each stage, and of the whole request as this page saw it. */
export async function infer(body, signal) {
  const began = performance.now();
  const response = await send("/infer", { method: "POST", body, headers: { prefer: "server-timing" }, signal });
  const reply = await response.json();
  return { reply, elapsed: performance.now() - began, stages: parseServerTiming(response.headers.get("server-timing") ?? "") };
}

/** Return the entries of a Server-Timing header as [name, milliseconds]. */
export function parseServerTiming(header) {
  return [...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, duration]) => [name, Number(duration)]);
}

/** Open a WebSocket that is a session of a model. A browser can send a key only as a subprotocol. */
export function openStream(model) {
  const query = new URLSearchParams({ model: model.name, version: model.version });
  const token = key.get();
  const url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/stream?${query}`;
  return new WebSocket(url, token ? ["seqserve", `seqserve.key.${token}`] : ["seqserve"]);
}
