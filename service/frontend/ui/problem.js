// How an error looks: what is wrong, where, and a way to try again.

import { button, h } from "./dom.js";

const TITLES = {
  0: "Not reachable",
  400: "The input was refused",
  401: "The key is not valid",
  403: "Not allowed",
  404: "Not found",
  409: "The session was lost",
  413: "Too large",
  429: "Too many requests",
  503: "Not available now",
  504: "Too late",
};

/** Return an alert about an error. retry: called when the user tries again; a wait that the service asks for passes first. */
export function problem(error, retry = null) {
  const again = retry && error.isTemporary ? button("Try again", retry) : null;
  if (again && error.retryAfter) wait(again, error.retryAfter);
  const field = error.field && h("code", {}, error.field);
  const title = h("p", { class: "problem-title" }, TITLES[error.status] ?? "The request failed", field);
  return h("div", { class: "problem", role: "alert" }, title, h("p", {}, sentence(error.message)), again);
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

function wait(again, seconds) {
  const count = () => {
    again.disabled = seconds > 0;
    again.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
    if (seconds > 0) setTimeout(count, 1000);
    seconds -= 1;
  };
  count();
}
