// Numbers for people: three significant digits, and a unit that fits.

const DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, useGrouping: false });
const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** Return a number with three significant digits, or a dash for what is no number. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return (size >= 1000 ? String(Math.round(value)) : DIGITS.format(value)).replace("-", "−");
}

export function percent(share) {
  const digits = share > 0 && share < 0.0995 ? 1 : 0;
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : "–";
}

/** Return a score between 0 and 1. */
export const score = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");

/** Return a duration in milliseconds. */
export function milliseconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} µs`;
  return value < 1000 ? `${DIGITS.format(value)} ms` : `${DIGITS.format(value / 1000)} s`;
}

export function bytes(count) {
  const power = count > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log(count) / Math.log(1000))) : 0;
  return `${DIGITS.format(count / 1000 ** power)} ${UNITS[power]}`;
}

/** Return the first names of a list. */
export const listed = (names) => names.slice(0, 12).join(", ") + (names.length > 12 ? ", …" : "");

/** Return the names of the numbers in a row. */
export const columnNames = ({ input }) => input.names ?? Array.from({ length: input.features }, (_, index) => `series ${index + 1}`);

export const count = (many, noun) => `${many} ${noun}${many === 1 ? "" : "s"}`;
