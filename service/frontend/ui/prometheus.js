// Prometheus' text format, and what grew between two scrapes.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;

/** Return the samples of an exposition as {name, labels, value}. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = line && !line.startsWith("#") && SAMPLE.exec(line);
    if (match) samples.push({ name: match[1], labels: parseLabels(match[2] ?? ""), value: Number(match[3]) });
  }
  return samples;
}

function parseLabels(text) {
  const pairs = [...text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)];
  return Object.fromEntries(pairs.map(([, name, value]) => [name, unescaped(value)]));
}

const unescaped = (value) => value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));

/** The samples of one scrape. at: its time in seconds. */
export class Scrape {
  constructor(text, at) {
    this.at = at;
    this.byName = new Map();
    for (const sample of parseMetrics(text)) {
      if (!this.byName.has(sample.name)) this.byName.set(sample.name, []);
      this.byName.get(sample.name).push(sample);
    }
  }

  /** Return the sum of a series over all label sets with these labels; 0 if there are none. */
  sum(name, labels = {}) {
    const wanted = Object.entries(labels);
    const fits = (sample) => wanted.every(([label, value]) => sample.labels[label] === value);
    return (this.byName.get(name) ?? []).filter(fits).reduce((sum, sample) => sum + sample.value, 0);
  }
}

/** Return what a counter grew by from one scrape to the next. Never negative: after a restart of the service it begins at 0. */
export function growth(before, now, name, labels) {
  return Math.max(0, now.sum(name, labels) - before.sum(name, labels));
}
