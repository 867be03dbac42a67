// Conversations: a line of questions that are answered one at a time, kept for each document.

import { answer_box, as_markdown } from "./answer.js";
import { changes, document_of, is_reading, name_of, read_in_full, state } from "./documents.js";
import { $, button, count, download, element, percent, say, seconds } from "./dom.js";
import { forget_all_talks, forget_talk, load_settings, load_talk, on_change_elsewhere, save_talk } from "./kept.js";
import { events, post } from "./server.js";

const talks = new Map(); // id of a document, "" without one -> its turns
const views = new WeakMap(); // turn -> its element
const line = []; // {id, turn} that wait for an answer, oldest first
let running = null; // {id, turn, stop} that is being answered
let editing = null; // a turn whose question is in the box
let follows = true; // whether the page scrolls with the answer
let leaving = false; // requests end with the page, which is not what happened to them

const here = () => state.chosen || "";
const about = (id) => ({ id, name: document_of(id) ? name_of(document_of(id)) : "" });
export const is_asked = (question) => turns_of(here()).some((turn) => turn.question === question);

// A turn is what is kept of a question: {question, both, settings, note, answers: {held, full}}.
function turns_of(id) {
  if (!talks.has(id)) {
    const turns = load_talk(id);
    turns.filter((turn) => !turn.done).forEach(break_off);
    talks.set(id, turns);
  }
  return talks.get(id);
}

// The page was closed while this was answered or waited.
function break_off(turn) {
  const last = Object.values(turn.answers).at(-1);
  if (last) last.note ||= "interrupted: the page was closed";
  else turn.note = "not asked: the page was closed";
  turn.done = true;
}

// ---- the line

// Asks; `edited` is the turn that the question takes the place of.
export function ask(question, edited = null) {
  const id = here(), turns = turns_of(id), place = turns.indexOf(edited);
  if (place >= 0) drop_from(id, place);
  const small = id && (document_of(id)?.method || state.method) !== "full";
  const turn = { question, both: Boolean(small && $("compare").checked), settings: load_settings(), note: "", done: false, answers: {} };
  turns.push(turn);
  line.push({ id, turn });
  follows = true;
  save_talk(id, turns);
  draw();
  advance();
  follow(id);
}

// Begins with the oldest question whose document is read.
function advance() {
  for (const job of [...line]) {
    const reason = never(job.id);
    if (reason) leave(job, reason);
  }
  const ready = ({ id }) => !id || document_of(id)?.status === "ready";
  if (!running && line.some(ready)) {
    [running] = line.splice(line.findIndex(ready), 1);
    running.stop = new AbortController();
    work(running).finally(() => {
      const { id } = running;
      running = null;
      advance();
      follow(id);
    });
  }
  for (const { id, turn } of line) note(turn, ready({ id }) ? "waiting: another answer comes first" : "waiting: the document is being read");
  draw_buttons();
}

// Why a question about a document will never be answered; empty: it will.
function never(id) {
  const each = document_of(id);
  if (id && !each) return "not asked: the document was deleted";
  return each?.status === "failed" ? `not asked: the document could not be read: ${each.error}` : "";
}

function leave(job, reason) {
  line.splice(line.indexOf(job), 1);
  job.turn.done = true;
  note(job.turn, reason);
  save_talk(job.id, turns_of(job.id));
}

const is_busy = (id) => running?.id === id || line.some((job) => job.id === id);

export function stop(id = here()) {
  for (const job of line.filter((each) => each.id === id)) leave(job, "stopped before it was asked");
  if (running?.id === id) running.stop.abort();
  draw_buttons();
}

async function work(job) {
  const { turn } = job;
  note(turn, "");
  say("answering…");
  try {
    // One after the other: each side is measured alone.
    await answer(job, "held", title_of(document_of(job.id)), () => job.id);
    if (turn.both) await answer(job, "full", "Answer from the full cache", (box) => read_in_full(job.id, (share) => tell_reading(job, box, share)));
    say("");
  } catch (error) {
    const stopped = error.name === "AbortError";
    say(stopped ? "stopped" : error.message, !stopped);
  } finally {
    turn.done = true;
    if (!leaving) save_talk(job.id, turns_of(job.id));
  }
}

// In words: the name of a method says nothing to most people.
function title_of(each) {
  if (!each || each.method === "full") return "Answer";
  return `Answer from the compressed cache, ${percent((each.device_bytes + each.host_bytes) / each.full_bytes)} of the full one`;
}

function tell_reading(job, box, share) {
  job.stop.signal.throwIfAborted();
  box.tell(`reading the document for the full cache, once: ${percent(share)}`);
}

// ---- an answer

async function answer(job, kind, title, document_for) {
  const { turn } = job, told = { kind, title, said: "", took: "", note: "", wrong: false, doubt: null };
  turn.answers[kind] = told;
  const box = answer_box(turn, told, about(job.id), () => follow(job.id));
  views.get(turn)?.querySelector(".answers").append(box.element);
  box.write(true);
  try {
    const id = await document_for(box);
    box.tell("");
    await stream(job, kind, id, told, box);
  } catch (error) {
    const stopped = error.name === "AbortError";
    told.wrong = !stopped;
    told.note = `${stopped ? "stopped" : `interrupted: ${error.message}`}${stopped && !told.said ? " before the first word" : ""}`;
    throw error;
  } finally {
    box.write(false);
  }
}

async function stream(job, kind, id, told, box) {
  const { settings } = job.turn, body = {
    model: state.model, messages: messages(job, kind), temperature: settings.temperature, max_tokens: settings.max_tokens,
    stream: true, stream_options: { include_usage: true }, ...(id ? { document: id } : {}),
  };
  const start = performance.now();
  let first = 0, usage = null;
  try {
    for await (const event of events(await post("v1/chat/completions", body, { signal: job.stop.signal }))) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice?.delta.content) {
        first ||= performance.now();
        told.said += choice.delta.content;
        box.grow();
      }
      if (choice?.finish_reason === "length") told.note = `cut at ${settings.max_tokens} tokens; the settings allow longer answers`;
      usage = event.usage || usage;
    }
  } finally {
    told.took = times(start, first, usage);
    told.doubt = usage?.doubt ?? null;
  }
}

function messages({ id, turn }, kind) {
  const turns = turns_of(id), { system } = turn.settings;
  const result = system.trim() ? [{ role: "system", content: system }] : [];
  for (const before of turns.slice(0, turns.indexOf(turn))) {
    const said = before.answers[kind]?.said || before.answers.held?.said;
    if (said) result.push({ role: "user", content: before.question }, { role: "assistant", content: said });
  }
  return [...result, { role: "user", content: turn.question }];
}

function times(start, first, usage) {
  if (!first) return "";
  const parts = [`first word after ${seconds(first - start)}`];
  const after = (performance.now() - first) / 1000, read = usage?.prompt_tokens_details?.cached_tokens;
  if (usage && usage.completion_tokens > 1 && after > 0) parts.push(`${((usage.completion_tokens - 1) / after).toFixed(1)} tokens/s`);
  if (read) parts.push(`${count(usage.prompt_tokens - read)} tokens read, ${count(read)} were in the cache`);
  if (is_reading()) parts.push("while a document was being read");
  return parts.join(" · ");
}

// ---- what is shown

export function draw() {
  const turns = turns_of(here());
  $("turns").replaceChildren(...turns.map((turn) => views.get(turn) || view(turn, here())));
  draw_buttons();
  changes.dispatchEvent(new Event("talked"));
}

function view(turn, id) {
  const made = element("article", "", "turn"), asked = element("div", element("p", turn.question, "asked"), "row");
  const answers = element("div", "", turn.both ? "answers two" : "answers");
  asked.append(
    button("Edit", "small", () => edit(turn), "Edit this question"),
    button("Retry", "small retry", () => retry(turn), "Ask this again"),
  );
  for (const told of Object.values(turn.answers)) answers.append(answer_box(turn, told, about(id)).element);
  made.append(asked, element("p", turn.note, "note"), answers);
  views.set(turn, made);
  return made;
}

function note(turn, words) {
  turn.note = words;
  const box = views.get(turn)?.querySelector(".note");
  if (box && box.textContent !== words) box.textContent = words;
}

function draw_buttons() {
  const turns = turns_of(here());
  $("stop").hidden = !is_busy(here());
  $("export").hidden = $("forget").hidden = turns.length === 0;
  turns.forEach((turn, place) => {
    const retry = views.get(turn)?.querySelector(".retry");
    if (retry) retry.hidden = !turn.done || place < turns.length - 1;
  });
}

// Scrolls with what is written, unless somebody has scrolled away from it.
function follow(id) {
  if (follows && id === here()) $("end").scrollIntoView({ block: "nearest" });
}

let scrolled = 0;
// What grows below moves the end away too: only somebody who goes up leaves it.
addEventListener("scroll", () => {
  const at_end = $("end").getBoundingClientRect().top < innerHeight - $("ask").offsetHeight + 40;
  if (at_end || scrollY < scrolled) follows = at_end;
  scrolled = scrollY;
}, { passive: true });

// ---- what people do with it

function drop_from(id, place) {
  const turns = turns_of(id), gone = turns.splice(place);
  for (const job of line.filter(({ turn }) => gone.includes(turn))) line.splice(line.indexOf(job), 1);
  if (gone.includes(running?.turn)) running.stop.abort();
}

function retry(turn) {
  edit(null);
  drop_from(here(), turns_of(here()).indexOf(turn));
  ask(turn.question);
  $("question").focus();
}

// Puts a question back into the box; null: leaves that again.
export function edit(turn) {
  if (!turn && !editing) return false;
  editing = turn;
  $("question").value = turn ? turn.question : "";
  say(turn ? "editing: asking again drops this question and what came after it; Escape leaves it as it is" : "");
  if (turn) $("question").focus();
  return true;
}

// The turn whose question was in the box and is sent; what is typed from here on is a question of its own.
export function take_edited() {
  const turn = editing;
  editing = null;
  return turn;
}

export function forget_conversation(id = here()) {
  stop(id);
  talks.delete(id);
  forget_talk(id);
  draw();
}

export function forget_all() {
  for (const id of [...talks.keys()]) stop(id);
  talks.clear();
  forget_all_talks();
  draw();
}

export function export_conversation() {
  const name = document_of(here())?.name || "conversation";
  download(as_markdown(name, state.model, turns_of(here())), `${name.replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 60)}.md`);
}

changes.addEventListener("listed", advance);
changes.addEventListener("chosen", () => {
  if (!turns_of(here()).includes(editing)) edit(null);
  draw();
});
changes.addEventListener("deleted", ({ detail }) => forget_conversation(detail));
on_change_elsewhere((changed) => {
  for (const id of changed === null ? [...talks.keys()] : [changed]) {
    if (is_busy(id)) continue;
    talks.set(id, load_talk(id));
    for (const turn of talks.get(id)) if (!turn.done) turn.note = "is being answered on another page";
  }
  draw();
});
addEventListener("pagehide", () => {
  leaving = true;
  for (const { id, turn } of running ? [running, ...line] : line) {
    break_off(turn);
    save_talk(id, turns_of(id));
  }
});
addEventListener("pageshow", () => { leaving = false; });
