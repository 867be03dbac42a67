// Result against memory for each experiment, and values by position in a text.
const ABSCISSAE = {
  device: { name: "device memory, share of the full cache", of: (row) => (row.full_bytes ? row.device_bytes / row.full_bytes : null), text: (value) => percent(value, value < 0.2 ? 1 : 0) },
  memory: { name: "memory, share of the full cache", of: (row) => row.share, text: (value) => percent(value, value < 0.2 ? 1 : 0) },
  tokens: { name: "tokens stored per KV head, the most", of: (row) => row.tokens_stored, text: (value) => number(value, 4) },
  read: { name: "tokens a query reads", of: (row) => row.tokens_read, text: (value) => number(value, 4) },
  budget: { name: "budget", of: (row) => row.budget_value, text: (value) => number(value) },
};

function pointTip(row, experiment) {
  const lines = [`${row.method} ${row.budget}`.trim(), `${experiment.measure}: ${withInterval(row, experiment.share)}`];
  if (row.device_bytes !== null) lines.push(`memory: ${memoryCell(row)}${row.share === null ? "" : ` (${percent(row.share, 0)} of full)`}`);
  if (row.tokens_stored !== null || row.tokens_read !== null) lines.push(`tokens: ${tokensCell(row)}`);
  lines.push(`n = ${row.count}${row.failed ? `, failed ${row.failed}` : ""}`);
  return lines.join("\n");
}

function curveLines(rows, abscissa, experiment) {
  const methods = unique(rows.map((row) => row.method));
  return methods.map((method) => {
    const own = rows.filter((row) => row.method === method && row.mean !== null);
    const points = own.filter((row) => row.budget).map((row) => ({
      x: abscissa.of(row), y: row.mean, low: row.low, high: row.high, tip: pointTip(row, experiment), order: row.budget_value,
    })).filter((point) => point.x !== null).sort((a, b) => a.order - b.order);
    const whole = own.find((row) => !row.budget);
    return { name: method, method, points, level: whole ? { y: whole.mean } : null };
  }).filter((line) => line.points.length || line.level);
}

function usable(name, rows) {
  const bounded = rows.filter((row) => row.budget && row.mean !== null);
  if (!bounded.length) return false;
  if (name === "device" && !bounded.some((row) => row.host_bytes)) return false;
  if (name === "budget" && new Set(bounded.map((row) => row.budget_value > 1)).size > 1) return false;
  return bounded.every((row) => Number.isFinite(ABSCISSAE[name].of(row)));
}

// How far the largest value lies from the smallest, as a ratio.
function spread(rows, of) {
  const values = rows.filter((row) => row.budget && row.mean !== null).map(of);
  return Math.max(...values) / Math.min(...values);
}

// Where there are very many lines, variants of a method wait in the legend.
function variantsOfMany(rows) {
  const methods = unique(rows.map((row) => row.method));
  return new Set(methods.length > 15 ? methods.filter((method) => method.includes(":")) : []);
}

function experimentCurves(experiment) {
  const models = modelsOf(experiment.rows);
  const state = { model: models[0], setting: "", axis: "" };
  const hidden = variantsOfMany(experiment.rows);
  const holder = el("div", {});
  const render = () => {
    const ofModel = experiment.rows.filter((row) => row.model === state.model);
    const settings = unique(ofModel.map((row) => row.setting));
    if (!settings.includes(state.setting)) state.setting = settings[0];
    const rows = ofModel.filter((row) => row.setting === state.setting);
    const names = Object.keys(ABSCISSAE).filter((name) => usable(name, rows));
    const axis = names.includes(state.axis) ? state.axis : names.find((name) => spread(rows, ABSCISSAE[name].of) > 1.5) || names[0];
    const set = (name) => (value) => { state[name] = value; render(); };
    const bar = controls(
      choice("model", plain(models), state.model, set("model")),
      choice("setting", settings.map((value) => [value, value || "all"]), state.setting, set("setting")),
      choice("against", names.map((name) => [name, ABSCISSAE[name].name]), axis, set("axis")));
    holder.replaceChildren(bar, ...(names.length ? curves(rows, axis) : [el("p", { class: "hint" }, "No method with a budget was measured in this setting; the table above has the rows.")]));
  };
  const curves = (rows, axis) => {
    const abscissa = ABSCISSAE[axis];
    const budgets = new Map(rows.filter((row) => row.budget).map((row) => [row.budget_value, row.budget]));
    const isBudget = axis === "budget";
    return plot(curveLines(rows, abscissa, experiment), {
      hidden, xLog: true, xBase: 2, yLog: experiment.logarithmic, yFloor: experiment.logarithmic ? null : 0,
      xTicks: isBudget ? [...budgets.keys()].sort((a, b) => a - b) : null,
      xText: isBudget ? (value) => budgets.get(value) : abscissa.text,
      yText: (value) => (experiment.share ? percent(value, 0) : number(value)),
      xLabel: abscissa.name, yLabel: `${experiment.measure} (${experiment.higher_is_better ? "higher" : "lower"} is better)`,
      label: `${experiment.title}: ${experiment.measure} against ${abscissa.name}, one line for each method`,
    });
  };
  render();
  return section(experiment.id, experiment.title, experiment.text, holder);
}

// {name, measure, entries: [{model, setting, method, budget, x, mean, low, high}]}
function positionCurves(group) {
  const models = modelsOf(group.entries);
  const state = { model: models[0], setting: "", budget: "" };
  const hidden = new Set();
  const holder = el("div", {});
  const render = () => {
    const ofModel = group.entries.filter((entry) => entry.model === state.model);
    const settings = unique(ofModel.map((entry) => entry.setting));
    if (!settings.includes(state.setting)) state.setting = settings[0];
    const ofSetting = ofModel.filter((entry) => entry.setting === state.setting);
    const budgets = unique(ofSetting.map((entry) => entry.budget)).filter(Boolean);
    if (!budgets.includes(state.budget)) state.budget = budgets[0] || "";
    const entries = ofSetting.filter((entry) => !entry.budget || entry.budget === state.budget);
    const set = (name) => (value) => { state[name] = value; render(); };
    holder.replaceChildren(
      controls(
        choice("model", plain(models), state.model, set("model")),
        choice("setting", settings.map((value) => [value, value || "all"]), state.setting, set("setting")),
        choice("budget", plain(budgets), state.budget, set("budget"))),
      ...plot(entries.map((entry) => positionLine(entry, group)), {
        hidden, xLog: false, yLog: false, xText: (value) => number(value, 6), yText: (value) => number(value),
        xLabel: "position in the text, tokens", yLabel: group.measure,
        label: `${group.measure} by position, one line for each method`,
      }));
  };
  render();
  return section(group.id, group.title, group.text, holder);
}

function positionLine(entry, group) {
  const points = entry.x.map((x, at) => ({
    x, y: entry.mean[at], low: entry.low[at], high: entry.high[at],
    tip: `${entry.method} ${entry.budget}\nposition ${number(x, 6)}\n${group.measure}: ${number(entry.mean[at])}`
      + (entry.low[at] === null ? "" : ` [${number(entry.low[at])}, ${number(entry.high[at])}]`),
  })).filter((point) => point.y !== null);
  return { name: entry.method, method: entry.method, points, level: null, bare: points.length > 40 };
}
