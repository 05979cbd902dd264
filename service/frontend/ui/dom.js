// Elements built from values. Text stays text: nothing here parses markup, so a name from a model or a card can never become an element.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. Properties: `class`, `on…` listeners, `data-`/`aria-` and other attributes; null and false leave one out. */
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
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Replace what an element contains. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a paragraph for a state without content. */
export const empty = (text) => h("p", { class: "empty" }, text);

/** Return a button that does not submit a form. */
export const button = (label, onclick, properties = {}) => h("button", { type: "button", onclick, ...properties }, label);
