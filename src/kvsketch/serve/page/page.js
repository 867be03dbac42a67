// The page: what people do with its buttons, and the start.

import { add_file, add_text, open_documents, state } from "./documents.js";
import { $, count, say } from "./dom.js";
import { load_settings, save_settings, USUAL } from "./kept.js";
import { get, server } from "./server.js";
import { ask, draw, edit, export_conversation, forget_all, forget_conversation, stop } from "./talk.js";

const FIELDS = { temperature: Number, max_tokens: Number, system: String };

// ---- questions

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question) return;
  $("question").value = "";
  try {
    // A file that is being sent is what the question is about.
    if (state.sent) say("waits in line: the file is being sent");
    await state.sent;
  } catch {
    $("question").value ||= question;
    return say("not asked: the file was not sent", true);
  }
  say("");
  ask(question);
});
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

async function start() {
  try {
    const [model] = (await get("v1/models")).data;
    Object.assign(state, { model: model.id, method: model.method, whole: model.whole_below });
    $("model").textContent = `${model.id} · ${model.method} · up to ${count(model.context)} tokens`;
    $("compare-label").hidden = model.method === "full";
    await open_documents();
    draw();
  } catch (error) {
    $("model").textContent = "";
    say(`the server cannot be reached: ${error.message}`, true);
  }
}

server.addEventListener("back", async () => {
  await start();
  say("the server is back");
});
// What gets the focus or is followed is not hidden behind the question.
new ResizeObserver(() => {
  document.documentElement.style.scrollPaddingBottom = `${$("ask").offsetHeight}px`;
}).observe($("ask"));
show_settings(load_settings());
start();
