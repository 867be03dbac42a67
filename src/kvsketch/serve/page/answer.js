// One answer: its text, what happened to it, how long it took, and the passages near it.

import { go_to, marked } from "./cache.js";
import { button, copy, element, percent } from "./dom.js";
import { render } from "./markdown.js";
import { held_share, named_place, near, shaded } from "./text.js";

const DOUBTFUL = 0.5; // of 1: from here on a doubt is told
const DOUBT = "Uncertain: the model was unsure of this answer. Look it up in the text, or ask the full cache.";

// The box of `told`, an answer to a turn about the document `id` of this name; `grown` is called when it has become longer.
export function answer_box(turn, told, { id, name }, grown = () => {}) {
  const said = element("div", "", "said"), note = element("p", "", "note"), took = element("p", "", "took");
  const doubt = element("p", "", "doubt"), actions = element("div", "", "row");
  const box = element("section", element("h4", told.title), told.kind === "full" ? "answer plain" : "answer");
  said.dir = "auto";
  actions.append(button("Copy", "small", () => copy(told.said), "Copy this answer"));
  box.append(said, note, doubt, took, actions);
  const cited = element("div", "", "near");
  if (id && told.kind !== "full") box.append(cited);
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
    // Where the document is gone or its text does not come, the answer stands without a passage.
    if (!now && told.said && id && told.kind !== "full") {
      show_passages(cited, turn, told, id, name).then(grown, () => cited.replaceChildren());
    }
  };
  const grow = () => {
    if (!asked) requestAnimationFrame(paint);
    asked = true;
  };
  write(false);
  return { element: box, write, grow, tell: (words) => { note.textContent = words; } };
}

// The passage that is nearest to an answer by its words, as a citation; others below it.
async function show_passages(box, turn, told, id, name) {
  const { text, runs, places } = await marked(id), found = near(text, `${turn.question} ${told.said}`);
  const [first, ...others] = found.map((each) => passage(id, text, runs, each, named_place(name, places, each.start)));
  if (!first) return box.replaceChildren();
  const parts = [element("p", "Nearest passage in the document", "hint"), first];
  if (others.length) {
    const more = element("details", element("summary", `${others.length} more`));
    more.append(...others);
    parts.push(more);
  }
  box.replaceChildren(...parts);
}

function passage(id, text, runs, { start, end }, place) {
  const made = button("", "passage", () => go_to(id, start, end, made));
  const source = element("small", element("b", place));
  source.append(` · ${percent(held_share(runs, start, end))} of the heads store it · show it in the text`);
  made.append(...shaded(text, runs, start, end), source);
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
