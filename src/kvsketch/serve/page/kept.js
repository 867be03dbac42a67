// What the browser keeps over a reload: a conversation for each document, and the settings of answers.

const TALK = "kvsketch-talk:"; // and the document's id: the time of the last change, a line break, the turns as JSON
const SETTINGS = "kvsketch-settings";
const MOST_TALKS = 40;
const MOST_CHARACTERS = 2_000_000; // of all of them; browsers keep about 5 million
export const USUAL = { temperature: 0, max_tokens: 512, system: "" };

// A browser may keep nothing at all; then everything lasts as long as the page.
function stored(action, otherwise) {
  try {
    return action(localStorage);
  } catch {
    return otherwise;
  }
}

export function load_talk(id) {
  const turns = stored((store) => {
    const text = store.getItem(TALK + id) || "";
    return JSON.parse(text.slice(text.indexOf("\n")) || "[]");
  }, []);
  return Array.isArray(turns) ? turns.filter((turn) => typeof turn?.question === "string" && turn.answers) : [];
}

export function save_talk(id, turns) {
  if (!turns.length) return forget_talk(id);
  let some = turns, text = JSON.stringify(some);
  while (text.length > MOST_CHARACTERS / 2 && some.length > 1) {
    some = some.slice(Math.ceil(some.length / 2));
    text = JSON.stringify(some);
  }
  stored((store) => {
    store.removeItem(TALK + id);
    make_room(store, text.length);
    put(store, TALK + id, `${Date.now()}\n${text}`);
  });
}

// The conversations that were changed least recently go first.
function make_room(store, wanted) {
  const old = oldest(store);
  let total = old.reduce((sum, key) => sum + store.getItem(key).length, wanted);
  while (old.length && (old.length >= MOST_TALKS || total > MOST_CHARACTERS)) {
    total -= store.getItem(old[0]).length;
    store.removeItem(old.shift());
  }
}

function put(store, key, text) {
  for (const old of [...oldest(store), null]) {
    try {
      return store.setItem(key, text);
    } catch (error) {
      if (old === null) throw error;
      store.removeItem(old);
    }
  }
}

const oldest = (store) =>
  Object.keys(store).filter((key) => key.startsWith(TALK)).sort((a, b) => parseInt(store.getItem(a)) - parseInt(store.getItem(b)));

export const forget_talk = (id) => stored((store) => store.removeItem(TALK + id));
export const forget_all_talks = () => stored((store) => oldest(store).forEach((key) => store.removeItem(key)));

// Calls `changed(id)` when another page of this server has changed a conversation; null: all of them.
export function on_change_elsewhere(changed) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(TALK)) changed(key && key.slice(TALK.length));
  });
}

export function load_settings() {
  const kept = stored((store) => JSON.parse(store.getItem(SETTINGS) || "{}"), {});
  const same_kind = Object.entries(USUAL).filter(([name, usual]) => typeof kept?.[name] === typeof usual);
  return { ...USUAL, ...Object.fromEntries(same_kind.map(([name]) => [name, kept[name]])) };
}

export const save_settings = (settings) => stored((store) => store.setItem(SETTINGS, JSON.stringify(settings)));
