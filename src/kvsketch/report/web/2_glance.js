// At a glance: every method at one budget, one column for each experiment, shaded from its worst to its best value.
function glanceColumns(experiments, { model, variant }, budget) {
  return experiments.map((experiment) => {
    const rows = experiment.rows.filter((row) => row.model === model && row.variant === variant && row.mean !== null);
    const first = rows.length ? rows.reduce((a, b) => (b.setting_order < a.setting_order ? b : a)).setting : "";
    const chosen = rows.filter((row) => row.setting === first && (row.budget === budget || !row.budget));
    return { experiment, setting: first, rows: new Map(chosen.map((row) => [row.method, row])), bounded: chosen.some((row) => row.budget) };
  }).filter((column) => column.bounded);
}

// 0 for the worst value of a column, 1 for its best.
function goodness(column, row) {
  const bend = column.experiment.logarithmic ? Math.log : (value) => value;
  const values = [...column.rows.values()].map((each) => bend(each.mean)).filter(Number.isFinite);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const place = high > low ? (bend(row.mean) - low) / (high - low) : 1;
  return column.experiment.higher_is_better ? place : 1 - place;
}

function glanceCell(column, method) {
  const row = column.rows.get(method);
  if (!row) return el("td", { class: "number" }, "–");
  const good = goodness(column, row);
  const best = Math.max(...[...column.rows.values()].filter((each) => each.budget).map((each) => goodness(column, each)));
  return el("td", {
    class: row.budget && good === best ? "number best" : "number", style: `background:color-mix(in srgb, var(--accent) ${Math.round(40 * good)}%, transparent)`,
    onpointermove: (event) => showTip(pointTip(row, column.experiment), event.clientX, event.clientY), onpointerleave: hideTip,
  }, shown(row.mean, column.experiment.share), row.failed ? el("span", { class: "failed" }, " !") : null);
}

// Memory of a method at the chosen budget, share of the full cache, in the mean of the experiments.
function glanceMemory(columns, method) {
  const rows = columns.map((column) => column.rows.get(method)).filter((row) => row && row.share !== null);
  if (!rows.length) return el("td", { class: "number" }, "–");
  const mean = (bytes) => rows.reduce((sum, row) => sum + bytes(row) / row.full_bytes, 0) / rows.length;
  const host = mean((row) => row.host_bytes || 0);
  return el("td", { class: "number" }, percent(mean((row) => row.device_bytes), 0), host ? el("span", { class: "interval" }, ` + ${percent(host, 0)} host`) : null);
}

function glanceSection(experiments) {
  const all = experiments.flatMap((experiment) => experiment.rows);
  const models = modelsOf(all);
  const state = { model: models[0], variant: "", budget: "" };
  const holder = el("div", {});
  const render = () => {
    const ofModel = all.filter((row) => row.model === state.model && row.budget);
    const variants = unique(ofModel.map((row) => row.variant)).sort();
    if (!variants.includes(state.variant)) state.variant = variants[0];
    const rows = ofModel.filter((row) => row.variant === state.variant);
    const budgets = unique([...rows].sort((a, b) => a.budget_value - b.budget_value).map((row) => row.budget));
    const often = (budget) => glanceColumns(experiments, state, budget).length;
    if (!budgets.includes(state.budget)) state.budget = budgets.reduce((a, b) => (often(b) > often(a) ? b : a), budgets[0]);
    const columns = glanceColumns(experiments, state, state.budget);
    const methods = DATA.methods_in_order.filter((method) => columns.some((column) => column.rows.has(method)));
    const set = (name) => (value) => { state[name] = value; render(); };
    holder.replaceChildren(
      controls(choice("model", plain(models), state.model, set("model")),
        choice("measured", variants.map((name) => [name, name || "the usual way"]), state.variant, set("variant")), choice("budget", plain(budgets), state.budget, set("budget"))),
      el("div", { class: "scroll fit", tabindex: 0, role: "region", "aria-label": "Methods by experiment" },
        el("table", { class: "glance" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "method" }, "method"), el("th", { scope: "col" }, "memory", el("small", {}, "share of the full cache")), columns.map((column) => el("th", { scope: "col" },
            el("a", { href: `#${column.experiment.id}` }, column.experiment.title),
            el("small", {}, `${column.experiment.measure}${column.setting ? `, ${column.setting}` : ""}; ${column.experiment.higher_is_better ? "more" : "less"} is better`))))),
          el("tbody", {}, methods.map((method) => el("tr", {}, el("td", { class: "method" }, method), glanceMemory(columns, method), columns.map((column) => glanceCell(column, method))))))));
  };
  render();
  return section("glance", "At a glance", "Each column is shaded from its worst value to its best; the best of the methods with a budget is bold; ! marks means that lack runs which failed.", holder);
}
