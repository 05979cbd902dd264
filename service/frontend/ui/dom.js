// Elements built from values. Text stays text: nothing here parses markup, so no name or card of a model becomes an element.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. properties: listeners, named on…, and attributes. One that is null or false is left out. */
export function h(tag, properties = {}, ...children) {
  return build(document.createElement(tag), properties, children);
}

/** Return an element of an SVG drawing. */
export function svg(tag, properties = {}, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

const present = (children) => children.flat(Infinity).filter((child) => ![null, undefined, false].includes(child));

export const byId = (id) => document.getElementById(id);

/** Replace what an element contains. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

/** Return a paragraph for a state without content. */
export const empty = (text) => h("p", { class: "empty" }, text);

export const hint = (...children) => h("p", { class: "hint" }, children);
export const span = (name, ...children) => h("span", { class: name }, children);

/** Return the sign of a colour beside its name or value. */
export const swatch = (name) => h("span", { class: `swatch ${name}`, "aria-hidden": "true" });

/** Return a large value with its name. */
export function headline(name, value) {
  return h("p", { class: "headline" }, span("headline-name", name), span("headline-value", value));
}

/** Return a button that does not submit a form. */
export const button = (label, onclick, properties = {}) => h("button", { type: "button", onclick, ...properties }, label);
