// A document's text: its sentences, those near an answer, and how much of them the cache holds.

import { element } from "./dom.js";

const NEAR = 3; // passages shown below an answer
const SHORTEST = 12; // characters of a passage
const LONGEST = 600;
const WRAPPED = 45; // characters of a line at least that goes on in the next one
const ENDS = /([.!?…]+["'”’)\]]*)(?=\s|$)|[。！？]+|\n/g;
const words = (text) => new Set(text.split(" "));
const TITLES = words("al approx bros ca cf co corp dr gen gov hon inc jr lt ltd messrs mr mrs ms mt prof rev sr st viz vs");
const BEFORE_NUMBERS = words(
  "apr art aug ch chap dec eq eqs feb fig figs jan jul jun mar no nos nov oct op p par para pp ref sec secs sep sept tab vol vols",
);
const NUMBERED = /(?:^|\s)(?:section|sections|chapter|article|figure|table|part|page|item|step|rule|clause|paragraph|equation|§+)\s+[\d.]+$/i;
const MARKED = /^\s*(?:[-*+•|#>]|\d{1,3}(?:\.\d+)*[.)]\s|\p{Lu}\p{Ll}*\s\d+[:.])/u; // a line that begins something new

// Places [start, end] of the sentences of a text.
export function sentences(text) {
  const result = [];
  let start = 0;
  for (const match of text.matchAll(ENDS)) {
    const end = match.index + match[0].length;
    if (end - start < LONGEST && !ends_there(text, start, match.index, match[0])) continue;
    result.push([start, end]);
    start = end;
  }
  if (start < text.length) result.push([start, text.length]);
  return result.map(([from, to]) => trimmed(text, from, to)).filter(([from, to]) => to > from);
}

function trimmed(text, from, to) {
  const part = text.slice(from, to), left = part.length - part.trimStart().length;
  return [from + left, from + Math.max(left, part.trimEnd().length)];
}

function ends_there(text, start, at, sign) {
  if (sign === "\n") return line_ends(text, at);
  if (sign !== ".") return !/^\s+\p{Ll}/u.test(text.slice(at + sign.length, at + sign.length + 8));
  const said = text.slice(start, at).trimStart(), word = /[^\s("'“‘]*$/.exec(said)[0].toLowerCase();
  const behind = text.slice(at + 1, at + 8);
  if (/^\s+\p{Ll}/u.test(behind) || TITLES.has(word) || /^\p{L}(?:\.\p{L})*$/u.test(word)) return false;
  if (BEFORE_NUMBERS.has(word) && /^\s+[\d(§IVX]/.test(behind)) return false;
  // "11." alone is the number of a heading, and "Section 11." names one.
  return !/^[#\s]*(?:[\d.]{0,8}\d|[ivxlc]+)$/i.test(said) && !NUMBERED.test(said.slice(-40));
}

// Lines of a paragraph that was wrapped go on; others end where they end.
function line_ends(text, at) {
  const line = text.slice(Math.max(text.lastIndexOf("\n", at - 1) + 1, at - LONGEST), at);
  const stop = text.indexOf("\n", at + 1), next = text.slice(at + 1, stop < 0 ? at + LONGEST : Math.min(stop, at + LONGEST));
  return line.trim().length < WRAPPED || !next.trim() || MARKED.test(next) || MARKED.test(line) && /[:;]$/.test(line.trim());
}

// The sentences that share the rarest words with a question and its answer.
export function near(text, words) {
  const wanted = words_of(words), { all, seen } = index(text);
  const rarity = (word) => Math.log(1 + all.length / seen.get(word));
  const score = (each) => {
    const shared = [...each.words].filter((word) => wanted.has(word));
    return shared.reduce((sum, word) => sum + rarity(word), 0) / Math.sqrt(4 + each.words.size);
  };
  const scored = all.map(({ start, end, words: own }) => ({ start, end, score: score({ words: own }) }));
  return scored.filter((each) => each.score > 0).sort((a, b) => b.score - a.score).slice(0, NEAR);
}

const words_of = (text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu) || []);
let last = { text: null }; // the text that was looked through last

// The sentences of a text with their words, and in how many of them a word is.
function index(text) {
  if (last.text === text) return last;
  const seen = new Map(), all = sentences(text).filter(([start, end]) => end - start > SHORTEST)
    .map(([start, end]) => ({ start, end, words: words_of(text.slice(start, end)) }));
  for (const each of all) for (const word of each.words) seen.set(word, (seen.get(word) || 0) + 1);
  return (last = { text, all, seen });
}

// Places in a text are code points for the server and UTF-16 units here: those of [from, to, level] or [from, name].
export function in_units(text, runs) {
  if (!/[\ud800-\udbff]/.test(text)) return runs;
  const places = [0];
  for (const point of text) places.push(places.at(-1) + point.length);
  return runs.map((run) => run.map((each, at) => (at < run.length - 1 ? places[each] : each)));
}

// Where a passage is, for people: the file and its page.
export function named_place(name, places, start) {
  const place = places.findLast(([from]) => from <= start)?.[1] || "";
  // The places of files that were joined name the file themselves.
  return place && !/^(?:page|slide|sheet|chapter) /.test(place) ? place : [name, place].filter(Boolean).join(", ");
}

// A part of a text, marked by how many heads hold it.
export function shaded(text, runs, start, end) {
  if (!runs.length) return [text.slice(start, end)];
  return runs
    .filter(([from, to]) => to > start && from < end)
    .map(([from, to, level]) => element("span", text.slice(Math.max(from, start), Math.min(to, end)), `l${level}`));
}

export function held_share(runs, start, end) {
  let sum = 0;
  for (const [from, to, level] of runs) sum += Math.max(0, Math.min(to, end) - Math.max(from, start)) * level;
  return sum / (8 * Math.max(1, end - start));
}
