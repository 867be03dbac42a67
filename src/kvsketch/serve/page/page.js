// The page: documents, questions, and what the cache holds. Talks to the server's own API and to nothing else.

const POLL = 500; // ms between looks at a document that is being read
const SHOWN = 300000; // characters of a document that are marked
const NEAR = 3; // passages shown below an answer
const AGAIN = 2000; // ms between looks for a server that has gone
const GONE = "the server does not answer: it was stopped, or the connection is lost";
const $ = (id) => document.getElementById(id);
const state = { model: "", method: "", whole: 0, documents: [], chosen: null, texts: new Map(), talks: new Map(), busy: null };

// ---- the server

async function call(path, options = {}) {
  const key = sessionStorage.getItem("kvsketch-key");
  const headers = { ...(options.headers || {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch(lost);
  if (response.status === 401) {
    await askForKey();
    return call(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error?.message || `${response.status} ${response.statusText}`);
  }
  return response;
}

// The browser's own words for a server that is gone help nobody.
function lost(error) {
  if (error.name === "AbortError") throw error;
  look_again();
  throw new Error(GONE);
}

async function look_again() {
  if (state.looking) return;
  state.looking = true;
  do await wait(AGAIN); while (!(await fetch("health").then((response) => response.ok, () => false)));
  state.looking = false;
  await start();
  say("the server is back");
}

const get = async (path) => (await call(path)).json();
const post = (path, body, more = {}) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...more });

function askForKey() {
  const dialog = $("key");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("kvsketch-key", $("key-value").value);
      resolve();
    }, { once: true });
  });
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(response.body.getReader())) {
    rest += decoder.decode(bytes, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
    }
  }
}

async function* chunks(reader) {
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    yield value;
  }
}

// ---- small things

function element(tag, content = "", name = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(content);
  return made;
}

const count = (number) => number.toLocaleString("en");
const megabytes = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function say(message, wrong = false, where = "status") {
  $(where).textContent = message;
  $(where).classList.toggle("wrong", wrong);
}

const say_there = (message, wrong) => say(message, wrong, "upload");

// ---- documents

async function refresh() {
  state.documents = (await get("v1/documents")).data.filter((each) => each.status !== "other_model");
  const shown = state.documents.filter(is_shown);
  const list = $("list");
  const rows = shown.reverse().map(row);
  const focused = document.activeElement?.dataset?.id;
  list.replaceChildren(...rows);
  if (focused) list.querySelector(`.choose[data-id="${focused}"]`)?.focus();
  return shown;
}

// A second reading with the full cache is there for comparisons only; a short text has no other.
const is_shown = (each) => each.method === state.method || state.method === "full" || each.tokens < state.whole;

const text_of = async (id) => state.texts.get(id)?.text ?? (await (await call(`v1/documents/${id}/text`)).text());

function row(each) {
  const item = element("li");
  const choose = element("button", each.name || "pasted text", "choose");
  choose.type = "button";
  choose.dataset.id = each.id;
  choose.setAttribute("aria-pressed", String(state.chosen === each.id));
  const told = { waiting: "waiting to be read", failed: `could not be read: ${each.error}` }[each.status]
    || (each.status === "reading" ? `reading: ${count(each.tokens_read)} of ${count(each.tokens)} tokens` : `${count(each.tokens)} tokens`);
  choose.append(element("small", told, each.status === "failed" ? "wrong" : ""));
  choose.onclick = () => choose_document(each.id);
  const remove = element("button", "✕", "remove");
  remove.type = "button";
  remove.setAttribute("aria-label", `Delete ${each.name || "pasted text"}`);
  remove.onclick = () => remove_document(each);
  item.append(choose, remove);
  if (each.status === "reading" || each.status === "waiting") {
    const bar = element("progress");
    bar.max = each.tokens;
    bar.value = each.tokens_read;
    bar.setAttribute("aria-label", `Reading ${each.name}`);
    item.append(bar);
  }
  return item;
}

async function add(sending, name) {
  try {
    say_there(`sending ${name}`);
    const document_ = await (await sending).json();
    await choose_document(document_.id);
    await until_read(document_.id, name);
  } catch (error) {
    say_there(`${name}: ${error.message}`, true);
  }
}

const add_text = (text, name) => add(post("v1/documents", { text, name }), name);

function add_file(file) {
  const form = new FormData();
  form.append("file", file);
  return add(call("v1/documents", { method: "POST", body: form }), file.name);
}

async function until_read(id, name) {
  for (;;) {
    const shown = await refresh();
    const found = state.documents.find((each) => each.id === id);
    if (!found || found.status === "failed") return say_there(found ? `${name}: ${found.error}` : `${name} was deleted`, true);
    if (found.status === "ready") {
      say_there(`${name} is read; ask about it`);
      if (shown.some((each) => each.id === id) && state.chosen === id) await show(found);
      return found;
    }
    say_there(`reading ${name}: ${percent(found.tokens_read / found.tokens)}`);
    await wait(POLL);
  }
}

async function choose_document(id) {
  state.chosen = id;
  location.hash = id || "";
  await refresh();
  const found = state.documents.find((each) => each.id === id);
  draw_turns();
  for (const part of ["cache", "passages"]) $(part).hidden = !found || found.status !== "ready";
  $("about").textContent = found ? `About ${found.name || "the pasted text"}` : "Without a document, questions go to the model alone.";
  if (found?.status === "ready") await show(found);
}

async function remove_document(each) {
  if (!confirm(`Delete ${each.name || "the pasted text"} and its cache?`)) return;
  try {
    for (const id of [...(await twins(each)), each.id]) {
      await call(`v1/documents/${id}`, { method: "DELETE" });
      state.texts.delete(id);
      state.talks.delete(id);
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

// ---- what the cache holds

async function show(each) {
  $("cache").hidden = $("passages").hidden = false;
  const held = each.device_bytes + each.host_bytes;
  const all = each.slots.flat();
  const mean = all.reduce((sum, slots) => sum + slots, 0) / all.length;
  numbers([
    ["tokens read", count(each.tokens)],
    ["kept by a head", `${count(Math.round(mean))} on average (${percent(mean / each.tokens)})`],
    ["cache", `${megabytes(held)}, ${percent(held / each.full_bytes)} of full`],
    ["read in", `${seconds(1000 * each.seconds)} (${count(Math.round(each.tokens / each.seconds))} tokens/s)`],
    ["method", each.method],
    ...(each.promise ? [["promise", each.promise]] : []),
  ]);
  const [full, small] = $("bytes").querySelectorAll("span");
  full.style.width = "100%";
  full.textContent = `full cache ${megabytes(each.full_bytes)}`;
  small.style.width = `${Math.min(100, (100 * held) / each.full_bytes)}%`;
  small.textContent = `held ${megabytes(held)}`;
  $("bytes").setAttribute("aria-label", `The cache holds ${megabytes(held)}; the full cache would hold ${megabytes(each.full_bytes)}`);
  picture(each);
  await mark(each.id);
}

function numbers(rows) {
  $("numbers").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
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
      cell.title = `layer ${number}, head ${head}: ${count(layer[head] || 0)} slots`;
      cells.push(cell);
    });
  }
  grid.replaceChildren(...cells);
  grid.setAttribute("aria-label", `${layers.length} layers of ${heads} heads; a head holds ${count(least)} to ${count(most)} slots`);
  $("slots-hint").textContent = `Each column is a layer, each row a head. A head holds ${count(least)} to ${count(most)} of ${count(each.tokens)} tokens.`;
}

async function mark(id) {
  if (!state.texts.has(id)) {
    const [text, runs] = await Promise.all([call(`v1/documents/${id}/text`).then((each) => each.text()), get(`v1/documents/${id}/passages`)]);
    state.texts.set(id, { text, runs: in_units(text, runs.data) });
  }
  if (state.chosen !== id) return;
  const { text, runs } = state.texts.get(id);
  $("text").replaceChildren(...shaded(text, runs, 0, Math.min(SHOWN, text.length)));
  if (text.length > SHOWN) $("text").append(` … and ${count(text.length - SHOWN)} more characters`);
}

// Places in a text are code points for the server and UTF-16 units here.
function in_units(text, runs) {
  if (!/[\ud800-\udbff]/.test(text)) return runs;
  const places = [0];
  for (const point of text) places.push(places.at(-1) + point.length);
  return runs.map(([from, to, level]) => [places[from], places[to], level]);
}

function shaded(text, runs, start, end) {
  if (!runs.length) return [text.slice(start, end)];
  return runs
    .filter(([from, to]) => to > start && from < end)
    .map(([from, to, level]) => element("span", text.slice(Math.max(from, start), Math.min(to, end)), `l${level}`));
}

function held_share(runs, start, end) {
  let sum = 0;
  for (const [from, to, level] of runs) sum += Math.max(0, Math.min(to, end) - Math.max(from, start)) * level;
  return sum / (8 * Math.max(1, end - start));
}

// The sentences of a text that share the rarest words with a question and its answer.
function near(text, words) {
  const tokens = (each) => new Set(each.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu) || []);
  const wanted = tokens(words), sentences = [];
  for (const match of text.matchAll(/[^.!?\n]+(?:[.!?]+|\n|$)/g)) {
    if (match[0].trim().length > 12) sentences.push({ start: match.index, end: match.index + match[0].length, words: tokens(match[0]) });
  }
  const seen = new Map();
  for (const { words: each } of sentences) for (const word of each) seen.set(word, (seen.get(word) || 0) + 1);
  const rarity = (word) => Math.log(1 + sentences.length / seen.get(word));
  for (const each of sentences) {
    each.score = [...each.words].filter((word) => wanted.has(word)).reduce((sum, word) => sum + rarity(word), 0) / Math.sqrt(4 + each.words.size);
  }
  return sentences.filter((each) => each.score > 0).sort((a, b) => b.score - a.score).slice(0, NEAR);
}

// ---- questions

const talk = () => {
  const id = state.chosen || "";
  if (!state.talks.has(id)) state.talks.set(id, { turns: [] });
  return state.talks.get(id);
};

function draw_turns() {
  $("turns").replaceChildren(...talk().turns.map((turn) => turn.element));
  $("forget").hidden = talk().turns.length === 0;
}

async function ask(question) {
  const id = state.chosen, turns = talk().turns;
  // Another document may be chosen while this one is answered: the turn keeps its own conversation.
  const turn = { question, before: [...turns], element: element("article", "", "turn"), answers: {} };
  turn.element.append(element("p", question, "asked"));
  const method = state.documents.find((each) => each.id === id)?.method || state.method;
  const both = $("compare").checked && id && method !== "full";
  const side = element("div", "", both ? "answers two" : "answers");
  turn.element.append(side);
  turns.push(turn);
  draw_turns();
  state.busy = new AbortController();
  turn.signal = state.busy.signal;
  busy(true);
  say("answering…");
  try {
    const work = [answer(turn, side, id, "held", method)];
    if (both) work.push(answer_in_full(turn, side, id));
    const failed = (await Promise.allSettled(work)).find((each) => each.status === "rejected");
    if (failed) throw failed.reason;
    say("");
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    busy(false);
  }
}

function busy(now) {
  $("send").disabled = now;
  $("stop").hidden = !now;
  if (!now) state.busy = null;
}

async function answer_in_full(turn, side, id) {
  const box = answer_box(side, "full cache", "plain");
  const text = await text_of(id);
  const name = state.documents.find((each) => each.id === id)?.name || "";
  let found = await (await post("v1/documents", { text, name, method: "full" })).json();
  while (found.status === "waiting" || found.status === "reading") {
    box.said.textContent = `reading the document for the full cache, once: ${percent(found.tokens_read / found.tokens)}`;
    await wait(POLL);
    if (turn.signal.aborted) {
      box.said.textContent = "stopped before the first word";
      box.said.classList.remove("writing");
      throw new DOMException("stopped", "AbortError");
    }
    found = await get(`v1/documents/${found.id}`);
  }
  box.said.textContent = "";
  box.held = found;
  await stream(turn, box, found.id, "full");
}

async function answer(turn, side, id, kind, title) {
  const box = answer_box(side, id ? `${title}` : state.model, "");
  await stream(turn, box, id, kind);
  if (id && state.texts.has(id)) box.element.append(passages_of(turn, id, box.said.textContent));
}

function answer_box(side, title, name) {
  const made = { element: element("div", "", `answer ${name}`), said: element("p", "", "said writing"), took: element("p", "", "took") };
  made.element.append(element("h4", title), made.said, made.took);
  side.append(made.element);
  return made;
}

async function stream(turn, box, id, kind) {
  const messages = [];
  for (const before of turn.before) {
    const said = before.answers[kind] ?? before.answers.held;
    if (said) messages.push({ role: "user", content: before.question }, { role: "assistant", content: said });
  }
  messages.push({ role: "user", content: turn.question });
  const body = { model: state.model, messages, temperature: 0, max_tokens: 512, stream: true, stream_options: { include_usage: true } };
  if (id) body.document = id;
  const start = performance.now();
  let first = 0, usage = null, reason = "";
  try {
    for await (const event of events(await post("v1/chat/completions", body, { signal: turn.signal }))) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice?.delta.content) {
        first ||= performance.now();
        box.said.append(choice.delta.content);
      }
      reason = choice?.finish_reason || reason;
      usage = event.usage || usage;
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "broken off";
    if (!first) box.said.append(reason === "stopped" ? "stopped before the first word" : error.message);
    if (reason !== "stopped") box.said.classList.add("wrong");
    throw error;
  } finally {
    box.said.classList.remove("writing");
    turn.answers[kind] = box.said.textContent;
    box.took.textContent = times(start, first, usage, reason);
  }
}

function times(start, first, usage, reason) {
  if (!first) return "";
  const parts = [`first word after ${seconds(first - start)}`];
  const after = (performance.now() - first) / 1000;
  if (usage && usage.completion_tokens > 1 && after > 0) parts.push(`${((usage.completion_tokens - 1) / after).toFixed(1)} tokens/s`);
  const read = usage?.prompt_tokens_details?.cached_tokens;
  if (read) parts.push(`${count(usage.prompt_tokens - read)} tokens read, ${count(read)} were held ready`);
  if (reason === "length") parts.push("cut at 512 tokens");
  if (reason === "stopped" || reason === "broken off") parts.push(reason);
  return parts.join(" · ");
}

function passages_of(turn, id, said) {
  const { text, runs } = state.texts.get(id);
  const found = near(text, `${turn.question} ${said}`);
  const box = element("details", "", "near");
  box.append(element("summary", "passages of the document near this answer, and how much of them is held"));
  for (const each of found) {
    const line = element("p");
    line.append(...shaded(text, runs, each.start, each.end), element("small", `held in ${percent(held_share(runs, each.start, each.end))} of the heads`));
    box.append(line);
  }
  if (!found.length) box.append(element("p", "none shares a word with it"));
  return box;
}

// ---- what people do

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || state.busy) return;
  const chosen = state.documents.find((each) => each.id === state.chosen);
  if (chosen && chosen.status !== "ready") return say("the document is still being read; ask when it is done", true);
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => { state.busy?.abort(); $("question").focus(); });
$("forget").addEventListener("click", () => { state.talks.delete(state.chosen || ""); draw_turns(); $("question").focus(); });
$("file").addEventListener("change", (event) => { if (event.target.files[0]) add_file(event.target.files[0]); event.target.value = ""; });
$("paste-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("pasted").value;
  if (!text.trim()) return;
  add_text(text, `${text.trim().slice(0, 40)}…`);
  $("pasted").value = "";
  $("paste").open = false;
});
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", kind === "dragenter" || kind === "dragover");
    if (kind !== "drop") return;
    const file = event.dataTransfer.files[0], text = event.dataTransfer.getData("text");
    if (file) add_file(file);
    else if (text) add_text(text, "dropped text");
  });
}

async function start() {
  try {
    const [model] = (await get("v1/models")).data;
    Object.assign(state, { model: model.id, method: model.method, whole: model.whole_below });
    $("model").textContent = `${model.id} · ${model.method} · up to ${count(model.context)} tokens`;
    $("compare-label").hidden = model.method === "full";
    const shown = await refresh();
    const wanted = location.hash.slice(1);
    const first = shown.find((each) => each.id === wanted) || shown[0];
    if (first) await choose_document(first.id);
    for (const each of shown) if (each.status === "waiting" || each.status === "reading") until_read(each.id, each.name);
  } catch (error) {
    $("model").textContent = "";
    say(`the server cannot be reached: ${error.message}`, true);
  }
}

start();
