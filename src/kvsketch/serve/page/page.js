// The page: what people do with its buttons, and the start.

import { add_file, add_text, open_documents, state } from "./documents.js";
import { $, count, say } from "./dom.js";
import { load_settings, save_settings, USUAL } from "./kept.js";
import { get, server } from "./server.js";
import { ask, draw, edit, export_conversation, forget_all, forget_conversation, stop, take_edited } from "./talk.js";

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
  if (opening) say("waits in line: the page is being opened");
  await opening;
  if (state.sent) say("waits in line: the file is being sent");
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
  if (event.target.files[0]) add_file(event.target.files[0]);
  event.target.value = "";
});
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

async function open_page() {
  const [model] = (await get("v1/models")).data;
  Object.assign(state, { model: model.id, method: model.method, whole: model.whole_below });
  $("compare-label").hidden = model.method === "full";
  await open_documents();
  draw();
  $("model").textContent = `${model.id} · ${model.method} · up to ${count(model.context)} tokens`;
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

server.addEventListener("back", () => start("the server is back"));
// What gets the focus or is followed is not hidden behind the question.
new ResizeObserver(() => {
  document.documentElement.style.scrollPaddingBottom = `${$("ask").offsetHeight}px`;
}).observe($("ask"));
show_settings(load_settings());
start();
