// The table of all results: sorted by any column, filtered by experiment, model and words.
const COLUMNS = [
  { name: "method", key: (row) => row.method, cell: (row) => row.method, kind: "method" },
  { name: "budget", key: (row) => row.budget_value, cell: (row) => row.budget || "all", kind: "number" },
  { name: "result [95%]", key: (row) => row.mean, cell: resultCell, kind: "number" },
  { name: "experiment", key: (row) => row.title, cell: (row) => [row.title, " ", el("span", { class: "interval" }, row.measure)], kind: "words" },
  { name: "setting", key: (row) => row.setting_order, cell: (row) => row.setting || "–", kind: "words" },
  { name: "memory", key: memoryOf, cell: memoryCell, kind: "number" },
  { name: "of full", key: (row) => row.share, cell: (row) => percent(row.share, 0), kind: "number" },
  { name: "tokens", key: (row) => row.tokens_read ?? row.tokens_stored, cell: tokensCell, kind: "number" },
  { name: "n", key: (row) => row.count, cell: (row) => String(row.count), kind: "number" },
  { name: "failed", key: (row) => row.failed, cell: failedCell, kind: "number" },
  { name: "model", key: (row) => row.model, cell: (row) => row.model },
];

function resultCell(row) {
  if (row.mean === null) return el("span", { class: "failed" }, "failed");
  if (row.low === null) return shown(row.mean, row.percent);
  const edges = `[${shown(row.low, row.percent)}, ${shown(row.high, row.percent)}]`;
  return [shown(row.mean, row.percent), " ", el("span", { class: "interval" }, edges)];
}
function memoryCell(row) {
  if (!row.host_bytes) return megabytes(row.device_bytes);
  return `${megabytes(row.device_bytes)} + ${megabytes(row.host_bytes)} host`;
}
function tokensCell(row) {
  const whole = (count) => Math.round(count).toLocaleString("en-US");
  const parts = [row.tokens_stored === null ? "" : whole(row.tokens_stored), row.tokens_read === null ? "" : `${whole(row.tokens_read)} read`];
  return parts.filter(Boolean).join(", ") || "–";
}
function failedCell(row) {
  return row.failed ? el("span", { class: "failed", title: row.failures.join("\n") }, String(row.failed)) : "0";
}

function compare(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
}

function resultsTable(rows) {
  const state = { column: null, falling: false, words: "", kind: "", model: "" };
  const body = el("tbody", {});
  const counted = el("p", { class: "hint", "aria-live": "polite" });
  const heads = COLUMNS.map((column, place) => el("th", { scope: "col", class: column.kind },
    el("button", { type: "button", onclick: () => sortBy(place) }, column.name)));

  function sortBy(place) {
    state.falling = state.column === place ? !state.falling : false;
    state.column = place;
    heads.forEach((head, at) => {
      if (at === place) head.setAttribute("aria-sort", state.falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    fill();
  }
  function wanted(row) {
    const text = `${row.method} ${row.budget} ${row.title} ${row.setting} ${row.model}`.toLowerCase();
    const found = state.words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
    return found && (!state.kind || row.title === state.kind) && (!state.model || row.model === state.model);
  }
  function sorted(chosen) {
    if (state.column === null) return chosen;
    const key = COLUMNS[state.column].key;
    const missing = (row) => key(row) === null || key(row) === undefined;
    return [...chosen].sort((a, b) => {
      const order = compare(key(a), key(b));
      return state.falling && !missing(a) && !missing(b) ? -order : order;
    });
  }
  function fill() {
    const chosen = sorted(rows.filter(wanted));
    body.replaceChildren(...chosen.map((row) => el("tr", {},
      COLUMNS.map((column) => el("td", { class: column.kind }, column.cell(row))))));
    counted.textContent = `${chosen.length} of ${rows.length} rows`;
  }
  const every = (values, all) => [["", all], ...plain(values)];
  const set = (name) => (value) => { state[name] = value; fill(); };
  const search = el("input", { type: "search", placeholder: "such as snapkv 1/8", oninput: () => set("words")(search.value) });
  fill();
  return [
    controls(
      choice("experiment", every(unique(rows.map((row) => row.title)), "all experiments"), "", set("kind"), true),
      choice("model", every(modelsOf(rows), "all models"), "", set("model"), true),
      field("words", search, "wide")),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results table" },
      el("table", { id: "results-table" }, el("thead", {}, el("tr", {}, heads)), body)),
    counted,
  ];
}
