// One answer: its text, what happened to it, how long it took, and the passages near it.

import { go_to, marked } from "./cache.js";
import { button, copy, element, percent } from "./dom.js";
import { render } from "./markdown.js";
import { held_share, near, shaded } from "./text.js";

const DOUBTFUL = 0.5; // of 1: from here on a doubt is told
const DOUBT = "In doubt: the model was unsure of this answer. Look it up in the text, or ask the full cache.";

// The box of `told`, an answer to a turn about the document `id`; `grown` is called when it has become longer.
export function answer_box(turn, told, id, grown = () => {}) {
  const said = element("div", "", "said"), note = element("p", "", "note"), took = element("p", "", "took");
  const doubt = element("p", "", "doubt"), actions = element("div", "", "row");
  const box = element("section", element("h4", told.title), told.kind === "full" ? "answer plain" : "answer");
  said.dir = "auto";
  actions.append(button("Copy", "small", () => copy(told.said), "Copy this answer"));
  box.append(said, note, doubt, took, actions);
  if (id && told.kind !== "full") box.append(passages(turn, told, id));
  let asked = false;
  const paint = () => {
    asked = false;
    render(said, told.said);
    grown();
  };
  const write = (now) => {
    box.classList.toggle("writing", now);
    box.setAttribute("aria-busy", String(now));
    note.textContent = told.note;
    note.classList.toggle("wrong", told.wrong);
    doubt.textContent = !now && told.kind !== "full" && told.doubt >= DOUBTFUL ? DOUBT : "";
    took.textContent = told.took;
    actions.hidden = now || !told.said;
    paint();
  };
  const grow = () => {
    if (!asked) requestAnimationFrame(paint);
    asked = true;
  };
  write(false);
  return { element: box, write, grow, tell: (words) => { note.textContent = words; } };
}

// They are looked for when somebody wants to see them.
function passages(turn, told, id) {
  const box = element("details", element("summary", "passages of the document near this answer, and how much of them is held"), "near");
  box.addEventListener("toggle", async () => {
    if (!box.open) return;
    const { text, runs } = await marked(id), result = near(text, `${turn.question} ${told.said}`);
    const lines = result.map((each) => passage(id, text, runs, each));
    box.replaceChildren(box.firstChild, ...(lines.length ? lines : [element("p", "none shares a word with it")]));
  });
  return box;
}

function passage(id, text, runs, { start, end }) {
  const made = button("", "passage", () => go_to(id, start, end, made));
  const share = percent(held_share(runs, start, end));
  made.append(...shaded(text, runs, start, end), element("small", `held in ${share} of the heads · go to its place`));
  return made;
}

// A conversation as a file.
export function as_markdown(name, model, turns) {
  const parts = [`# ${name}`, `Answers of ${model}.`];
  for (const turn of turns) {
    parts.push("---", turn.question.split("\n").map((each) => `> ${each}`).join("\n"));
    if (turn.note) parts.push(`*${turn.note}*`);
    for (const told of Object.values(turn.answers)) {
      parts.push(`**${told.title}**`, told.said, [told.note, told.took].filter(Boolean).map((each) => `*${each}*`).join("  \n"));
    }
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
