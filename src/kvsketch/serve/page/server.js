// The server's own API; nothing else is ever asked.

import { $, wait } from "./dom.js";

const AGAIN = 2000; // ms between looks for a server that has gone
const PULSE = 5000; // ms between looks at whether it is there
const GONE = "the server does not answer: it was stopped, or the connection is lost";
let looking = false;
export const server = new EventTarget(); // "lost": it does not answer; "back": it does again

export async function call(path, options = {}) {
  const key = sessionStorage.getItem("kvsketch-key");
  const headers = { ...(options.headers || {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch(lost);
  if (response.status === 401) {
    // Another request may have got the right key meanwhile.
    if (sessionStorage.getItem("kvsketch-key") === key) await ask_for_key(Boolean(key));
    options.signal?.throwIfAborted();
    return call(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error?.message || `${response.status} ${response.statusText}`);
  }
  return response;
}

export const get = async (path) => (await call(path)).json();
export const post = (path, body, more = {}) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...more });

// The browser's own words for a server that is gone help nobody.
function lost(error) {
  if (error.name === "AbortError") throw error;
  look_again();
  throw new Error(GONE);
}

async function look_again() {
  if (looking) return;
  looking = true;
  server.dispatchEvent(new Event("lost"));
  do await wait(AGAIN); while (!(await fetch("health").then((response) => response.ok, () => false)));
  looking = false;
  server.dispatchEvent(new Event("back"));
}

// Whether the server is there is seen before somebody asks it something.
setInterval(() => {
  if (!document.hidden && !looking) fetch("health").catch(look_again);
}, PULSE);

function ask_for_key(wrong) {
  const dialog = $("key");
  $("key-wrong").hidden = !wrong;
  if (wrong) $("key-value").select();
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("kvsketch-key", $("key-value").value);
      resolve();
    }, { once: true });
  });
}

// The events of a stream.
export async function* events(response) {
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
