// Markdown as elements. A model's text becomes text nodes and a few kinds of elements made here: it is never parsed as
// HTML, loads nothing, and links lead to http, https and mailto addresses alone.

import { button, copy, element } from "./dom.js";

const REACH = 1000; // characters between the signs of an emphasis, so that no text takes long
const LONGEST = 20000; // characters of a block at most; a longer one is shown as it is
const TRIED = 20; // signs that may end it
const WIDEST = 100; // columns of a table
const DEEPEST = 6; // lists and quotes inside each other
const SCHEMES = ["http:", "https:", "mailto:"];
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const DIVIDER = /^[ \t|:-]*-[ \t|:-]*$/; // between the head of a table and its rows
const SIGNS = /\\[!-/:-@[-`{-~]|`+|\*\*|\*|__|_|~~|!?\[|<(?=https?:|mailto:)|https?:\/\//g;
const LINK = /!?\[([^[\]]{0,1000})\]\(([^()\s]{1,2000})(?:[ \t]+"[^"]{0,300}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const QUOTED_ADDRESS = /<([^\s<>]{1,2000})>/y;
const EMPHASIS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "s" };
const shown = new WeakMap(); // box -> the sources of its blocks

// Shows a text in a box; blocks that are there already stay, so that a growing answer can be selected.
export function render(box, text) {
  const parts = blocks(text.split("\n")), before = shown.get(box) || [];
  let same = 0;
  while (same < parts.length && parts[same].source === before[same]) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...parts.slice(same).map((part) => part.make()));
  shown.set(box, parts.map((part) => part.source));
}

// Blocks in order, each with its source and how its element is made.
function blocks(lines, depth = 0) {
  const result = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const { end, make } = opened(lines, at, depth) || paragraph(lines, at, depth);
    result.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return result;
}

const made = (lines, depth) => blocks(lines, depth).map((part) => part.make());

function opened(lines, at, depth) {
  for (const kind of [fence, heading, rule, quote, list, table]) {
    const block = kind(lines, at, depth);
    if (block) return block;
  }
  return null;
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end++;
  return { end, make: () => inline(element("p"), lines.slice(at, end).join("\n").trim()) };
}

// A line of a paragraph may begin with the number of a year.
function interrupts(lines, at, depth) {
  const item = ITEM.exec(lines[at]);
  return item ? !/\d/.test(item[2]) || parseInt(item[2]) === 1 : opened(lines, at, depth) !== null;
}

function fence(lines, at) {
  const first = FENCE.exec(lines[at]);
  if (!first) return null;
  const [, signs, language] = first;
  const closing = new RegExp(`^ {0,3}${signs[0]}{${signs.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  return { end: Math.min(end + 1, lines.length), make: () => code(lines.slice(at + 1, end).join("\n"), language.trim()) };
}

function code(text, language) {
  const box = element("figure", "", "code"), caption = element("figcaption", element("span", language.slice(0, 30) || "code"));
  const listing = element("pre", element("code", text));
  listing.tabIndex = 0;
  listing.setAttribute("role", "region");
  listing.setAttribute("aria-label", "Code");
  caption.append(button("Copy", "small", () => copy(text), "Copy this code"));
  box.append(caption, listing);
  return box;
}

function heading(lines, at) {
  const first = HEADING.exec(lines[at]);
  // An answer stands below a heading of the fourth level.
  return first && { end: at + 1, make: () => inline(element(first[1].length === 1 ? "h5" : "h6"), first[2].trim()) };
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { end: at + 1, make: () => element("hr") } : null);

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= DEEPEST) return null;
  let end = at + 1;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => filled(element("blockquote"), made(inner, depth + 1)) };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= DEEPEST) return null;
  const numbered = /\d/.test(first[2]), outer = first[1].length, items = [];
  let end = at, width = 0;
  for (; end < lines.length; end++) {
    const line = lines[end], item = ITEM.exec(line), indent = line.search(/\S/);
    if (item && item[1].length < outer + 2 && /\d/.test(item[2]) === numbered) {
      width = line.length - item[3].length;
      items.push([item[3]]);
    } else if (indent < 0 ? goes_on(lines, end, outer) : indent > outer || !opened(lines, end, depth)) {
      items.at(-1).push(line.slice(Math.min(Math.max(indent, 0), width)));
    } else break;
  }
  return { end, make: () => list_of(items, numbered && parseInt(first[2]), depth) };
}

// Whether a list goes on behind an empty line.
function goes_on(lines, at, outer) {
  const next = lines.slice(at + 1, at + 3).find((line) => line.trim());
  return next !== undefined && (next.search(/\S/) > outer || ITEM.test(next));
}

function list_of(items, start, depth) {
  const box = element(start === false ? "ul" : "ol");
  if (start !== false) box.start = start;
  return filled(box, items.map((item) => filled(element("li"), made(item, depth + 1))));
}

function table(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("|") || !DIVIDER.test(lines[at + 1])) return null;
  if (lines[at].split("|").length > WIDEST) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  return { end, make: () => table_of(lines[at], lines.slice(at + 2, end)) };
}

function table_of(head, rows) {
  const row = (line, tag) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split("|").slice(0, WIDEST);
    return filled(element("tr"), cells.map((cell) => inline(element(tag), cell.trim())));
  };
  const box = element("div", "", "table"), grid = element("table");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  grid.append(filled(element("thead"), [row(head, "th")]), filled(element("tbody"), rows.map((line) => row(line, "td"))));
  box.append(grid);
  return box;
}

function filled(box, parts) {
  box.append(...parts);
  return box;
}

// ---- inside a block

function inline(box, text) {
  let plain = 0;
  for (let at = text.length > LONGEST ? text.length : next_sign(text, 0); at < text.length; ) {
    const part = part_at(text, at);
    if (part) {
      box.append(text.slice(plain, at), part.node);
      plain = at + part.length;
    }
    at = next_sign(text, at + (part || sign_at(text, at)).length);
  }
  box.append(text.slice(plain));
  return box;
}

function next_sign(text, from) {
  SIGNS.lastIndex = from;
  return SIGNS.exec(text)?.index ?? text.length;
}

function sign_at(text, at) {
  SIGNS.lastIndex = at;
  return SIGNS.exec(text)[0];
}

// What a sign begins, with its length in the text; null where it is a sign and no more.
function part_at(text, at) {
  const sign = sign_at(text, at);
  if (sign[0] === "\\") return { length: 2, node: sign[1] };
  if (sign[0] === "`") return code_span(text, at, sign);
  if (sign in EMPHASIS) return emphasis(text, at, sign);
  if (sign.endsWith("[")) return link(text, at);
  return sign === "<" ? quoted_address(text, at) : bare_address(text, at);
}

function code_span(text, at, sign) {
  const near = text.slice(at + sign.length, at + sign.length + REACH);
  for (const { 0: run, index } of near.matchAll(/`+/g)) {
    if (run.length === sign.length) return { length: index + 2 * sign.length, node: element("code", near.slice(0, index).trim()) };
  }
  return null;
}

function emphasis(text, at, sign) {
  const start = at + sign.length, near = text.slice(start, start + REACH);
  if (!/^\S/.test(near) || (sign[0] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] || ""))) return null;
  for (let end = near.indexOf(sign, 1), tried = 0; end > 0 && tried < TRIED; end = near.indexOf(sign, end + 1), tried++) {
    const after = near[end + sign.length] || "";
    const closes = /\S/.test(near[end - 1]) && after !== sign[0] && near[end - 1] !== sign[0];
    if (closes && !(sign[0] === "_" && /[\p{L}\p{N}]/u.test(after))) {
      return { length: end + 2 * sign.length, node: inline(element(EMPHASIS[sign]), near.slice(0, end)) };
    }
  }
  return null;
}

// A picture is not loaded: it is a link.
function link(text, at) {
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  if (!match) return null;
  const node = anchor(match[2], match[1] || match[2]);
  return node && { length: match[0].length, node };
}

function quoted_address(text, at) {
  QUOTED_ADDRESS.lastIndex = at;
  const match = QUOTED_ADDRESS.exec(text), node = match && anchor(match[1], match[1]);
  return node && { length: match[0].length, node };
}

// What ends a sentence does not belong to an address, nor does a bracket that was opened before it.
function bare_address(text, at) {
  ADDRESS.lastIndex = at;
  let address = (ADDRESS.exec(text)?.[0] || "").replace(/[.,;:!?*_~\]]+$/, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  const node = anchor(address, address);
  return node && { length: address.length, node };
}

function anchor(address, content) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !SCHEMES.includes(url.protocol)) return null;
  const node = element("a", content);
  Object.assign(node, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return node;
}
