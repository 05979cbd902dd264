// Rows of numbers as text and back: CSV from a file or a spreadsheet, or JSON.

import { count } from "./format.js";

/** What a user entered that is no input of the model. */
export class InputError extends Error {}

/** Return the rows of a text; throws InputError, which names the first wrong line. columns: how many numbers a row has; names: of these. */
export function parseRows(text, columns, names = []) {
  const trimmed = text.trim();
  if (!trimmed) return [];
  if (trimmed.startsWith("[")) return checked(parseJson(trimmed), columns);
  const lines = trimmed.split(/\r?\n/).map((line) => line.trim());
  const rows = lines.map((line) => line.split(/[,;\t ]+/).filter(Boolean).map(Number));
  const begin = rows.length > 1 && rows[0].every(Number.isNaN) ? 1 : 0; // a line of column names
  const titles = begin ? lines[0].split(/[,;\t]+/).map((title) => title.trim()) : [];
  const moved = titles.find((title, index) => names.includes(title) && names[index] !== title);
  if (moved) throw new InputError(`${moved} is in another column of Line 1: this model takes ${names.join(", ")}, in this order.`);
  return checked(rows.slice(begin), columns, begin);
}

function parseJson(text) {
  try {
    const rows = JSON.parse(text);
    return Array.isArray(rows[0]) ? rows : [rows];
  } catch {
    throw new InputError("This begins like JSON and is none: enter [[1, 2], [3, 4]], or one row on each line.");
  }
}

function checked(rows, columns, skipped = 0) {
  rows.forEach((row, index) => {
    const line = `Line ${index + 1 + skipped}`;
    const has = `${line} has ${count(row.length, "number")}`;
    if (row.length !== columns) throw new InputError(`${has} and this model takes ${columns}.`);
    if (!row.every(Number.isFinite)) throw new InputError(`${line} has something that is no number.`);
  });
  return rows;
}

export const formatRows = (rows) => rows.map((row) => row.map((value) => Number(value.toFixed(4))).join(", ")).join("\n");

/** Return token ids; throws InputError for the first entry that is none. */
export function parseIds(text, vocabulary) {
  const entries = text.replace(/[[\]]/g, " ").split(/[\s,;]+/).filter(Boolean);
  return entries.map((entry) => {
    const id = Number(entry);
    if (/^\d+$/.test(entry) && id < vocabulary) return id;
    throw new InputError(`${entry} is no token id of this model: use whole numbers from 0 to ${vocabulary - 1}.`);
  });
}
