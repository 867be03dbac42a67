// What the cache of a document holds: numbers, slots of each head, and the text marked by it.

import { $, count, element, megabytes, percent, seconds } from "./dom.js";
import { call, get } from "./server.js";
import { in_units, shaded } from "./text.js";

const SHOWN = 300000; // characters of a document that are marked
const texts = new Map(); // id -> {text, runs, places}
let shown = null;

export const text_of = async (id) => texts.get(id)?.text ?? (await (await call(`v1/documents/${id}/text`)).text());
export const forget_text = (id) => texts.delete(id);

// A document's text, the runs [start, end, level] of it, and the places [start, name] of its pages.
export async function marked(id) {
  if (!texts.has(id)) {
    const [text, runs] = await Promise.all([text_of(id), get(`v1/documents/${id}/passages`)]);
    texts.set(id, { text, runs: in_units(text, runs.data), places: in_units(text, runs.places || []) });
  }
  return texts.get(id);
}

export function hide() {
  shown = null;
  $("cache").hidden = $("passages").hidden = $("back").hidden = true;
  $("text").replaceChildren();
}

export async function show(each) {
  shown = each.id;
  $("cache").hidden = $("passages").hidden = false;
  const held = each.device_bytes + each.host_bytes;
  const all = each.slots.flat();
  const mean = all.reduce((sum, slots) => sum + slots, 0) / all.length;
  numbers([
    ["tokens read", count(each.tokens)],
    ["stored by a head", `${count(Math.round(mean))} on average (${percent(mean / each.tokens)})`],
    ["cache", `${megabytes(held)}, ${percent(held / each.full_bytes)} of full`],
    ["read in", `${seconds(1000 * each.seconds)} (${count(Math.round(each.tokens / each.seconds))} tokens/s)`],
    ["method", foldable(each.method)],
    ...(each.promise ? [["loss", each.promise]] : []),
  ]);
  bars(each.full_bytes, held);
  picture(each);
  await marked(each.id);
  if (shown === each.id) draw(each.id);
}

// A method folds between its parameters, never inside a number.
function foldable(method) {
  const made = element("span");
  made.append(...method.split(/(?<=:)/).flatMap((part) => [part, element("wbr")]));
  return made;
}

function numbers(rows) {
  $("numbers").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

function bars(full_bytes, held) {
  const [full, small] = $("bytes").querySelectorAll("span");
  full.style.width = "100%";
  full.textContent = `full cache ${megabytes(full_bytes)}`;
  small.style.width = `${Math.min(100, (100 * held) / full_bytes)}%`;
  small.textContent = `compressed ${megabytes(held)}`;
  $("bytes").setAttribute("aria-label", `The compressed cache takes ${megabytes(held)}; the full cache would take ${megabytes(full_bytes)}`);
}

function picture(each) {
  const layers = each.slots, heads = Math.max(...layers.map((layer) => layer.length));
  const most = Math.max(...layers.flat()), least = Math.min(...layers.flat());
  const grid = $("slots");
  grid.style.gridTemplateColumns = `repeat(${layers.length}, minmax(0, 1fr))`;
  const cells = [];
  for (let head = 0; head < heads; head++) {
    layers.forEach((layer, number) => {
      const cell = element("i");
      cell.style.opacity = 0.06 + 0.94 * ((layer[head] || 0) / each.tokens);
      cell.title = `layer ${number}, head ${head}: ${count(layer[head] || 0)} tokens`;
      cells.push(cell);
    });
  }
  grid.replaceChildren(...cells);
  grid.setAttribute("aria-label", `${layers.length} layers of ${heads} heads; a head stores ${count(least)} to ${count(most)} tokens`);
  $("slots-hint").textContent = `Each column is a layer, each row a head. A head stores ${count(least)} to ${count(most)} of ${count(each.tokens)} tokens.`;
}

// The text of a document from its beginning, or around a place that is marked.
function draw(id, start = 0, end = 0) {
  const { text, runs } = texts.get(id), from = end > SHOWN ? Math.max(0, start - SHOWN / 2) : 0;
  const to = Math.min(text.length, from + SHOWN), parts = shaded(text, runs, from, start);
  if (from) parts.unshift(`${count(from)} characters before … `);
  if (end) {
    const place = element("mark");
    place.append(...shaded(text, runs, start, end));
    place.tabIndex = -1;
    parts.push(place);
  }
  parts.push(...shaded(text, runs, end, to));
  if (to < text.length) parts.push(` … and ${count(text.length - to)} more characters`);
  $("text").replaceChildren(...parts);
}

// Goes to a place in the text of the document that is shown; `back` is where to return to.
export function go_to(id, start, end, back) {
  if (shown !== id) return;
  draw(id, start, end);
  const place = $("text").querySelector("mark");
  place.scrollIntoView({ block: "center" });
  place.focus({ preventScroll: true });
  $("back").hidden = false;
  $("back").onclick = () => {
    $("back").hidden = true;
    back.scrollIntoView({ block: "center" });
    back.focus({ preventScroll: true });
  };
}
