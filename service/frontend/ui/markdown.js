// A model card as elements: the common part of Markdown, read line by line. Everything else stays text, HTML included.

import { h } from "./dom.js";

const LINK = /^!?\[([^\]]*)\]\((https?:\/\/[^\s)]+)\)/;

/** Return the elements of a Markdown text. Headings begin below `level`. */
export function render(text, level = 2) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = readBlock(lines, at, level);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function readBlock(lines, at, level) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const heading = /^(#{1,6}) (.*)$/.exec(line);
  if (heading) return [h(`h${Math.min(6, heading[1].length + level)}`, {}, inline(heading[2])), at + 1];
  if (line.startsWith("```")) return readFence(lines, at);
  if (line.startsWith("    ")) return readWhile(lines, at, (one) => one.startsWith("    ") || !one.trim(), code);
  if (line.startsWith("|")) return readWhile(lines, at, (one) => one.startsWith("|"), table);
  if (line.startsWith(">")) return readWhile(lines, at, (one) => one.startsWith(">"), quote);
  if (isItem(line)) return readWhile(lines, at, (one) => isItem(one) || /^ {2,}\S/.test(one), list);
  return readWhile(lines, at, (one, first) => first || isText(one), (found) => h("p", {}, inline(found.join(" "))));
}

const isText = (line) => line.trim() && !/^(#{1,6} |```|\|)/.test(line) && !isItem(line);
const code = (lines) => h("pre", { tabindex: "0" }, lines.map((line) => line.slice(4)).join("\n").trimEnd());
const quote = (lines) => h("blockquote", {}, inline(lines.map((line) => line.slice(1)).join(" ")));
const isItem = (line) => /^ {0,3}([-*+]|\d{1,9}[.)]) /.test(line);

function readWhile(lines, at, belongs, make) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end === at)) end += 1;
  return [make(lines.slice(at, end)), end];
}

function readFence(lines, at) {
  let end = at + 1;
  while (end < lines.length && !lines[end].startsWith("```")) end += 1;
  return [h("pre", { tabindex: "0" }, lines.slice(at + 1, end).join("\n")), end + 1];
}

function list(lines) {
  const items = [];
  for (const line of lines) {
    if (isItem(line)) items.push(line.replace(/^ *\S+ /, ""));
    else items[items.length - 1] += ` ${line.trim()}`;
  }
  return h(/^ *\d/.test(lines[0]) ? "ol" : "ul", {}, items.map((item) => h("li", {}, inline(item))));
}

function table(lines) {
  const rows = lines.map((line) => line.replace(/^\||\|\s*$/g, "").split("|").map((cell) => cell.trim()));
  const hasHead = rows.length > 1 && rows[1].every((cell) => /^:?-+:?$/.test(cell));
  const body = rows.slice(hasHead ? 2 : 0).map((row) => h("tr", {}, row.map((cell) => h("td", {}, inline(cell)))));
  const head = hasHead && h("thead", {}, h("tr", {}, rows[0].map((cell) => h("th", { scope: "col" }, inline(cell)))));
  const whole = h("table", {}, head, h("tbody", {}, body));
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, whole);
}

/** Return the pieces of a line: code, links, strong and emphasised text, and plain text. An image becomes a link. */
function inline(text) {
  const pieces = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const [piece, length] = readSpan(text, at);
    if (piece) {
      pieces.push(plain, piece);
      plain = "";
    } else plain += text.slice(at, at + length);
    at += length;
  }
  return [...pieces, plain];
}

function readSpan(text, at) {
  const marker = ["**", "`", "*"].find((one) => text.startsWith(one, at));
  if (marker) {
    const end = text.indexOf(marker, at + marker.length);
    const inside = end > 0 ? text.slice(at + marker.length, end) : "";
    const meant = inside && (marker === "`" || inside.trim() === inside);
    const tag = { "**": "strong", "`": "code", "*": "em" }[marker];
    return meant ? [h(tag, {}, inside), inside.length + 2 * marker.length] : [null, marker.length];
  }
  const link = (text[at] === "[" || text.startsWith("![", at)) && LINK.exec(text.slice(at, at + 500));
  return link ? [h("a", { href: link[2], rel: "noopener noreferrer" }, link[1] || link[2]), link[0].length] : [null, 1];
}
