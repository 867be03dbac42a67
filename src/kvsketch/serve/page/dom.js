// Small things that every part of the page uses.

export const $ = (id) => document.getElementById(id);

export function element(tag, content = "", name = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(content);
  return made;
}

export function button(content, name, action, label = "") {
  const made = element("button", content, name);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.onclick = action;
  return made;
}

export const count = (number) => number.toLocaleString("en");
export const megabytes = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
export const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;
export const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function say(message, wrong = false, where = "status") {
  $(where).textContent = message;
  $(where).classList.toggle("wrong", wrong);
}

// Copies a text; a page that is not served by this machine or over TLS has no clipboard of its own.
export async function copy(text) {
  try {
    await (navigator.clipboard ? navigator.clipboard.writeText(text) : copy_selected(text));
    say("copied");
  } catch {
    say("the browser does not let the page copy; select the text and copy it", true);
  }
}

function copy_selected(text) {
  const focused = document.activeElement, box = element("textarea", text);
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!done) throw new Error("not copied");
}

export function download(text, name) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
