// The documents of the server: the list, the one that is chosen, sending and deleting.

import { forget_text, hide, show, text_of } from "./cache.js";
import { $, button, count, element, percent, say, wait } from "./dom.js";
import { call, get, post } from "./server.js";

const POLL = 500; // ms between looks at a document that is being read
// `sent`: while a file is being sent, a promise that is kept when it has arrived and is chosen
export const state = { model: "", method: "", whole: 0, documents: [], chosen: null, sent: null };
export const changes = new EventTarget(); // "listed", "chosen", "talked", and "deleted" with the id as its detail

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
    state.documents = data;
  }
  const shown = state.documents.filter(is_shown);
  const focused = document.activeElement?.dataset?.id;
  $("list").replaceChildren(...shown.reverse().map(row));
  if (focused) $("list").querySelector(`.choose[data-id="${focused}"]`)?.focus();
  changes.dispatchEvent(new Event("listed"));
  if (state.chosen && !document_of(state.chosen)) leave_deleted();
  return shown;
}

// A second reading with the full cache is there for comparisons only.
const is_shown = (each) => each.method !== "full" || state.method === "full" || !state.documents.some((other) => is_twin(each, other));
const is_twin = (full, other) => other.method !== "full" && other.name === full.name && other.characters === full.characters;

// Somebody else has deleted the document that is chosen here.
function leave_deleted() {
  changes.dispatchEvent(new CustomEvent("deleted", { detail: state.chosen }));
  forget_text(state.chosen);
  say_there("the document was deleted");
  choose_document(null);
}

// Whether the server works on something else than answers.
export const is_reading = () => state.documents.some((each) => is_shown(each) && each.status === "reading");

function row(each) {
  const item = element("li"), choose = button(name_of(each), "choose", () => choose_document(state.chosen === each.id ? null : each.id));
  choose.dataset.id = each.id;
  choose.setAttribute("aria-pressed", String(state.chosen === each.id));
  choose.append(element("small", told(each), each.status === "failed" ? "wrong" : ""));
  choose.disabled = each.status === "other_model";
  choose.title = [name_of(each), each.note].filter(Boolean).join("\n");
  if (!is_open(each)) item.append(choose, button("✕", "remove", () => remove_document(each), `Delete ${name_of(each)}`));
  else {
    item.append(choose, button("Cancel", "small", () => remove_document(each, false), `Cancel reading ${name_of(each)}`));
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
  if (each.status === "other_model") return "read with another model: send the file again to ask about it";
  if (each.status === "reading") return `reading: ${count(each.tokens_read)} of ${count(each.tokens)} tokens`;
  const usual = each.method === state.method || (each.method === "full" && each.tokens < state.whole);
  return `${count(each.tokens)} tokens${usual ? "" : ` · compressed with another method, ${each.method}`}`;
}

// ---- sending

let sending = null; // ends what is being sent

// `send` is given a signal and returns the promise of an answer.
async function add(send, name) {
  const stop = sending = new AbortController();
  try {
    say_there(`sending ${name}`);
    $("cancel").hidden = false;
    state.sent = choose_sent(send(stop.signal)).finally(() => {
      state.sent = null;
      if (sending === stop) $("cancel").hidden = true;
    });
    await until_read(await state.sent, name);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const told = error.message.startsWith(name) ? error.message : `${name}: ${error.message}`;
    say_there(stopped ? `${name} was not sent` : told, !stopped);
  }
}

export const stop_sending = () => sending?.abort();

async function choose_sent(answer) {
  const sent = await (await answer).json();
  if (!document_of(sent.id)) state.documents.push(sent);
  await choose_document(sent.id);
  return sent.id;
}

export const add_text = (text, name) => add((signal) => post("v1/documents", { text, name }, { signal }), name);

// Files of one form are one document.
export function add_files(files) {
  const form = new FormData();
  for (const file of files) form.append("file", file);
  const name = files.map((file) => file.name).join(", ");
  return add((signal) => call("v1/documents", { method: "POST", body: form, signal }), name);
}

async function until_read(id, name) {
  for (;;) {
    await refresh();
    const each = document_of(id);
    if (!each) return;
    if (each.status === "failed") return say_there(`${name}: ${each.error}`, true);
    if (each.status === "ready") {
      say_there(`${name} is read; ask about it${each.note ? `. ${each.note}` : ""}`);
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

async function remove_document(each, asks = true) {
  if (asks && !confirm(`Delete ${each.name || "the pasted text"}, its cache and its conversation?`)) return;
  try {
    // The reading with the full cache goes with it.
    const gone = await (await call(`v1/documents/${each.id}`, { method: "DELETE" })).json();
    for (const id of [each.id, ...gone.also_deleted]) {
      forget_text(id);
      changes.dispatchEvent(new CustomEvent("deleted", { detail: id }));
    }
    say_there(asks ? `${name_of(each)} was deleted` : `${name_of(each)} was not read`);
    await choose_document(state.chosen === each.id ? null : state.chosen);
  } catch (error) {
    say_there(error.message, true);
  }
  $("file").focus();
}

let opened = false; // whether the documents were listed before

// The documents of a server that was just reached. A choice that somebody has made stays, also that of no document.
export async function open_documents() {
  const before = state.chosen, shown = await refresh(), wanted = location.hash.slice(1);
  const ours = shown.filter((each) => each.status !== "other_model");
  const first = ours.find((each) => each.id === wanted) || (opened && !before ? null : ours[0]);
  opened = true;
  if (first && state.chosen === before) await choose_document(first.id);
  else if (!state.chosen) tell_choice(null);
  for (const each of shown.filter(is_open)) until_read(each.id, name_of(each)).catch((error) => say_there(error.message, true));
}
