// The page: what people do with its buttons, and the start.

import { add_files, add_text, changes, document_of, open_documents, refresh, state, stop_sending } from "./documents.js";
import { $, button, count, say } from "./dom.js";
import { load_settings, save_settings, USUAL } from "./kept.js";
import { call, get, server } from "./server.js";
import { ask, draw, edit, export_conversation, forget_all, forget_conversation, is_asked, stop, take_edited } from "./talk.js";

const FIELDS = { temperature: Number, max_tokens: Number, system: String };
// Until the server is reached and a document chosen: a promise of that. Where it is broken, the next question tries again.
let opening = null, broken = false;

// ---- questions

const unasked = []; // {question, edited} that wait until it is known what they are about

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question) return;
  $("question").value = "";
  if (unasked.push({ question, edited: take_edited() }) === 1) ask_all();
});

async function ask_all() {
  try {
    await what_they_are_about();
  } catch (error) {
    $("question").value = [...unasked.splice(0).map(({ question }) => question), $("question").value].filter(Boolean).join("\n");
    return say(`not asked: ${error.message}`, true);
  }
  say("");
  for (const { question, edited } of unasked.splice(0)) ask(question, edited);
}

// The document that the page opens with, or a file that is being sent.
async function what_they_are_about() {
  if (broken) start();
  if (opening) say("waiting: the page is being opened");
  await opening;
  if (state.sent) say("waiting: the file is being sent");
  await state.sent?.catch(() => { throw new Error("the file was not sent"); });
}

$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !$("key").open && !edit(null)) stop();
});
$("stop").addEventListener("click", () => {
  stop();
  $("question").focus();
});
$("export").addEventListener("click", export_conversation);
$("forget").addEventListener("click", () => {
  if (confirm("Delete this conversation?")) forget_conversation();
  $("question").focus();
});
$("forget-all").addEventListener("click", () => {
  if (confirm("Delete the conversations about all documents from this browser?")) forget_all();
});

// ---- settings

function show_settings(settings) {
  for (const name of Object.keys(FIELDS)) $(name).value = settings[name];
}

$("settings").addEventListener("change", ({ target }) => {
  if (!(target.id in FIELDS)) return;
  if (!target.checkValidity() || (target.required && !target.value)) return target.reportValidity();
  save_settings({ ...load_settings(), [target.id]: FIELDS[target.id](target.value) });
});
$("usual").addEventListener("click", () => {
  save_settings(USUAL);
  show_settings(USUAL);
});

// ---- documents

$("file").addEventListener("change", (event) => {
  take_files([...event.target.files]);
  event.target.value = "";
});
$("cancel").addEventListener("click", stop_sending);

let chosen_files = []; // several, of which it is not known yet whether they are one document

function take_files(files) {
  chosen_files = files.length > 1 ? files : [];
  $("several").hidden = !chosen_files.length;
  $("several-title").textContent = `${files.length} files: ${files.map((each) => each.name).join(", ")}`;
  if (chosen_files.length) $("as-one").focus();
  else if (files.length) add_files(files);
}

async function read_chosen(documents) {
  take_files([]);
  for (const files of documents) await add_files(files);
}
$("as-one").addEventListener("click", () => read_chosen([chosen_files]));
$("as-many").addEventListener("click", () => read_chosen(chosen_files.map((file) => [file])));
$("as-none").addEventListener("click", () => read_chosen([]));
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
    const files = [...event.dataTransfer.files], text = event.dataTransfer.getData("text");
    if (files.length) take_files(files);
    else if (text) add_text(text, "dropped text");
  });
}

// ---- the sample: a document and questions for whoever has none at hand

const SAMPLE = "Skerrow Lighthouse (sample)";
const QUESTIONS = ["What does a family ticket cost?", "When does the last tour begin?", "What should I do if the lamp fails at night?"];

function offer_sample() {
  const is_chosen = document_of(state.chosen)?.name === SAMPLE, left = QUESTIONS.filter((each) => !is_asked(each));
  $("sample").hidden = !left.length || !(is_chosen || (opened && !state.documents.length && !state.sent));
  $("sample-title").textContent = is_chosen ? "Questions to try:" : "No document at hand? Read a sample, the handbook of a lighthouse, and ask:";
  $("sample-questions").replaceChildren(...left.map((each) => button(each, "small", () => ask_sample(each, is_chosen))));
}

async function ask_sample(question, is_chosen) {
  try {
    const text = is_chosen ? "" : await (await call("sample.md")).text();
    if (text) add_text(text, SAMPLE);
    $("question").value = question;
    $("ask").requestSubmit();
    offer_sample();
  } catch (error) {
    say(error.message, true);
  }
}
for (const kind of ["listed", "chosen", "talked"]) changes.addEventListener(kind, offer_sample);

let opened = false; // whether the documents of the server are known

async function open_page() {
  const [model] = (await get("v1/models")).data;
  Object.assign(state, { model: model.id, method: model.method, whole: model.whole_below });
  $("compare-label").hidden = model.method === "full";
  await open_documents();
  opened = true;
  draw();
  offer_sample();
  $("model").textContent = `${model.id} · reads up to ${count(model.context)} tokens`;
  $("model").title = `method: ${model.method}`;
}

async function start(greeting = "") {
  try {
    broken = false;
    opening = open_page();
    await opening;
    opening = null;
    if (greeting) say(greeting);
  } catch (error) {
    broken = true;
    $("model").textContent = "";
    say(`the server cannot be reached: ${error.message}`, true);
  }
}

server.addEventListener("lost", () => { $("model").textContent = "not connected: trying again…"; });
server.addEventListener("back", () => start("the server is back"));
// Another page may have changed the list meanwhile.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && opened) refresh().catch(() => {});
});
// What gets the focus or is followed is not hidden behind the question.
new ResizeObserver(() => {
  document.documentElement.style.setProperty("--ask", `${$("ask").offsetHeight}px`);
}).observe($("ask"));
show_settings(load_settings());
start();
