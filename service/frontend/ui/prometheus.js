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
  return Object.fromEntries([...text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped))]));
}

/** The samples of one scrape. at: its time in seconds. */
export class Scrape {
  constructor(text, at) {
    this.at = at;
    this.byName = Map.groupBy ? Map.groupBy(parseMetrics(text), (sample) => sample.name) : grouped(parseMetrics(text));
  }

  /** Return the sum of a series over all label sets with these labels; 0 if there are none. */
  sum(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.byName.get(name) ?? []).reduce((sum, sample) => (wanted.every(([label, value]) => sample.labels[label] === value) ? sum + sample.value : sum), 0);
  }
}

function grouped(samples) {
  const groups = new Map();
  for (const sample of samples) groups.set(sample.name, [...(groups.get(sample.name) ?? []), sample]);
  return groups;
}

/** Return what a counter grew by from one scrape to the next. Never negative: after a restart of the service it begins at 0. */
export function growth(before, now, name, labels) {
  return Math.max(0, now.sum(name, labels) - before.sum(name, labels));
}
