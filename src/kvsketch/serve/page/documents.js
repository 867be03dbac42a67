// The documents of the server: the list, the one that is chosen, sending and deleting.

import { forget_text, hide, show, text_of } from "./cache.js";
import { $, button, count, element, percent, say, wait } from "./dom.js";
import { call, get, post } from "./server.js";

const POLL = 500; // ms between looks at a document that is being read
// `sent`: while a file is being sent, a promise that is kept when it has arrived and is chosen
export const state = { model: "", method: "", whole: 0, documents: [], chosen: null, sent: null };
export const changes = new EventTarget(); // "listed", "chosen", and "deleted" with the id as its detail

export const document_of = (id) => state.documents.find((each) => each.id === id);
export const name_of = (each) => each.name || "pasted text";
const is_open = (each) => each.status === "waiting" || each.status === "reading";
const say_there = (message, wrong) => say(message, wrong, "upload");

let looks = 0, newest = 0; // lists that were asked for, and which of them is shown

export async function refresh() {
  const look = ++looks, { data } = await get("v1/documents");
  // A list that comes after a later one does not know the documents that were sent since.
  if (look > newest) {
    newest = look;
    state.documents = data.filter((each) => each.status !== "other_model");
  }
  const shown = state.documents.filter(is_shown);
  const focused = document.activeElement?.dataset?.id;
  $("list").replaceChildren(...shown.reverse().map(row));
  if (focused) $("list").querySelector(`.choose[data-id="${focused}"]`)?.focus();
  changes.dispatchEvent(new Event("listed"));
  return shown;
}

// A second reading with the full cache is there for comparisons only; a short text has no other.
const is_shown = (each) => each.method === state.method || state.method === "full" || each.tokens < state.whole;

// Whether the server works on something else than answers.
export const is_reading = () => state.documents.some((each) => is_shown(each) && each.status === "reading");

function row(each) {
  const item = element("li"), choose = button(name_of(each), "choose", () => choose_document(state.chosen === each.id ? null : each.id));
  choose.dataset.id = each.id;
  choose.setAttribute("aria-pressed", String(state.chosen === each.id));
  choose.append(element("small", told(each), each.status === "failed" ? "wrong" : ""));
  item.append(choose, button("✕", "remove", () => remove_document(each), `Delete ${name_of(each)}`));
  if (is_open(each)) {
    const bar = element("progress");
    bar.max = each.tokens;
    bar.value = each.tokens_read;
    bar.setAttribute("aria-label", `Reading ${name_of(each)}`);
    item.append(bar);
  }
  return item;
}

function told(each) {
  if (each.status === "waiting") return "waiting to be read";
  if (each.status === "failed") return `could not be read: ${each.error}`;
  return each.status === "reading" ? `reading: ${count(each.tokens_read)} of ${count(each.tokens)} tokens` : `${count(each.tokens)} tokens`;
}

// ---- sending

async function add(sending, name) {
  try {
    say_there(`sending ${name}`);
    state.sent = choose_sent(sending).finally(() => { state.sent = null; });
    await until_read(await state.sent, name);
  } catch (error) {
    say_there(`${name}: ${error.message}`, true);
  }
}

async function choose_sent(sending) {
  const sent = await (await sending).json();
  if (!document_of(sent.id)) state.documents.push(sent);
  await choose_document(sent.id);
  return sent.id;
}

export const add_text = (text, name) => add(post("v1/documents", { text, name }), name);

export function add_file(file) {
  const form = new FormData();
  form.append("file", file);
  return add(call("v1/documents", { method: "POST", body: form }), file.name);
}

async function until_read(id, name) {
  for (;;) {
    await refresh();
    const each = document_of(id);
    if (!each || each.status === "failed") return say_there(each ? `${name}: ${each.error}` : `${name} was deleted`, true);
    if (each.status === "ready") {
      say_there(`${name} is read; ask about it`);
      if (state.chosen === id) await show(each);
      return;
    }
    say_there(`reading ${name}: ${percent(each.tokens_read / each.tokens)}`);
    await wait(POLL);
  }
}

// A reading of a document with the full cache; `progress` is told while it lasts and may throw.
export async function read_in_full(id, progress) {
  const sent = { text: await text_of(id), name: document_of(id)?.name || "", method: "full" };
  let each = await (await post("v1/documents", sent)).json();
  while (is_open(each)) {
    progress(each.tokens_read / each.tokens);
    await wait(POLL);
    progress(each.tokens_read / each.tokens);
    each = await get(`v1/documents/${each.id}`);
  }
  return each.id;
}

// ---- choosing and deleting

export async function choose_document(id) {
  state.chosen = id;
  location.hash = id || "";
  await refresh();
  const each = document_of(id);
  changes.dispatchEvent(new Event("chosen"));
  tell_choice(each);
  // Nobody waits for the picture: a question needs the choice alone.
  if (each?.status === "ready") show(each).catch((error) => say_there(error.message, true));
  else hide();
}

function tell_choice(each) {
  $("about").textContent = each ? `About ${each.name || "the pasted text"}` : "Without a document, questions go to the model alone.";
}

async function remove_document(each) {
  if (!confirm(`Delete ${each.name || "the pasted text"}, its cache and its conversation?`)) return;
  try {
    for (const id of [...(await twins(each)), each.id]) {
      await call(`v1/documents/${id}`, { method: "DELETE" });
      forget_text(id);
      changes.dispatchEvent(new CustomEvent("deleted", { detail: id }));
    }
    await choose_document(state.chosen === each.id ? null : state.chosen);
  } catch (error) {
    say_there(error.message, true);
  }
  $("file").focus();
}

// The readings of the same text with the full cache, which no list shows.
async function twins(each) {
  const alike = state.documents.filter((other) => !is_shown(other) && other.method === "full" && other.characters === each.characters);
  if (!alike.length) return [];
  const text = await text_of(each.id);
  const same = await Promise.all(alike.map(async (other) => (await text_of(other.id)) === text));
  return alike.filter((_, place) => same[place]).map((other) => other.id);
}

let opened = false; // whether the documents were listed before

// The documents of a server that was just reached. A choice that somebody has made stays, also that of no document.
export async function open_documents() {
  const before = state.chosen, shown = await refresh(), wanted = location.hash.slice(1);
  const first = shown.find((each) => each.id === wanted) || (opened && !before ? null : shown[0]);
  opened = true;
  if (first && state.chosen === before) await choose_document(first.id);
  else if (!state.chosen) tell_choice(null);
  for (const each of shown.filter(is_open)) until_read(each.id, name_of(each)).catch((error) => say_there(error.message, true));
}
