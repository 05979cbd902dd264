// The card of a model: what it is for, how it was made, and where it fails.

import { card } from "./api.js";
import { empty, fill } from "./dom.js";
import { render } from "./markdown.js";
import { problem } from "./problem.js";

/** Show the card of a model in an element as soon as it is opened. */
export function showCard(details, content, model) {
  const load = async () => {
    if (!details.open || details.dataset.model === model.id) return;
    details.dataset.model = model.id;
    fill(content, empty("Loading the card…"));
    try {
      const text = await card(model);
      if (details.dataset.model !== model.id) return;
      fill(content, text.trim() ? render(text) : empty("This model has no card."));
    } catch (error) {
      if (details.dataset.model !== model.id) return;
      delete details.dataset.model;
      fill(content, problem(error, load));
    }
  };
  delete details.dataset.model;
  details.ontoggle = load;
  load();
}
