// Needle heat maps: one tile for each method, depth against length, at one budget.
const heatFill = (value) => `color-mix(in oklab, var(--heat) ${Math.round(100 * value)}%, var(--raised))`;

function heatTile(map) {
  const left = 42, cell = Math.min(46, Math.max(24, Math.floor(236 / map.lengths.length))), high = 22, top = 4;
  const width = left + cell * map.lengths.length, height = top + high * map.depths.length + 34;
  const root = svg("svg", { viewBox: `0 0 ${Math.max(width, 180)} ${height}`, role: "img", "aria-label": `${map.method} ${map.budget}: share of needles found by depth and length`, style: `max-width:${Math.max(width, 180) * 1.25}px` });
  map.cells.forEach((line, row) => line.forEach((found, column) => {
    if (found === null) return;
    const [mean, count, failed] = found;
    const at = { x: left + column * cell, y: top + row * high };
    const text = mean === null ? "!" : `${Math.round(100 * mean)}`;
    const ink = mean !== null && mean > 0.75 ? "var(--ground)" : "var(--ink)";
    const words = `${map.method} ${map.budget}\n${number(map.lengths[column], 6)} tokens, depth ${percent(map.depths[row], 0)}\n`
      + `${mean === null ? "no value" : `found ${percent(mean)}`}, n = ${count}${failed ? `, failed ${failed}` : ""}`;
    root.append(svg("g", { onpointermove: (event) => showTip(words, event.clientX, event.clientY), onpointerleave: hideTip },
      svg("rect", { x: at.x + 0.5, y: at.y + 0.5, width: cell - 1, height: high - 1, rx: 2, style: `fill:${mean === null ? "var(--ground)" : heatFill(mean)};stroke:var(--line)` }),
      svg("text", { x: at.x + cell / 2, y: at.y + high / 2 + 4, "text-anchor": "middle", style: `fill:${mean === null ? "var(--bad)" : ink};font-size:11px` }, text)));
  }));
  map.depths.forEach((depth, row) => root.append(
    svg("text", { x: left - 6, y: top + row * high + high / 2 + 4, "text-anchor": "end", style: "font-size:11px" }, percent(depth, 0))));
  const every = Math.ceil((map.lengths.length * 30) / (cell * map.lengths.length));
  map.lengths.forEach((length, column) => column % every ? null : root.append(
    svg("text", { x: left + column * cell + cell / 2, y: height - 20, "text-anchor": "middle", style: "font-size:11px" }, compact(length))));
  root.append(svg("text", { x: left, y: height - 4, style: "font-size:11px" }, "tokens; depth at the left"));
  return el("div", { class: "tile" }, el("h3", {}, `${map.method} ${map.budget}`.trim()), root);
}
const compact = (tokens) => (tokens % 1024 === 0 ? `${tokens / 1024}k` : tokens >= 1000 ? `${Number((tokens / 1000).toPrecision(2))}k` : String(tokens));

function needleSection(maps) {
  const models = modelsOf(maps);
  const state = { model: models[0], budget: "", method: "" };
  const holder = el("div", {});
  const render = () => {
    const ofModel = maps.filter((map) => map.model === state.model);
    const budgets = unique(ofModel.map((map) => map.budget)).filter(Boolean);
    if (!budgets.includes(state.budget)) state.budget = budgets[0] || "";
    const methods = unique(ofModel.map((map) => map.method));
    if (!methods.includes(state.method)) state.method = "";
    const shownMaps = ofModel.filter((map) =>
      (state.method ? map.method === state.method : !map.budget || map.budget === state.budget));
    const set = (name) => (value) => { state[name] = value; render(); };
    holder.replaceChildren(
      controls(
        choice("model", plain(models), state.model, set("model")),
        choice("method", [["", "all, at one budget"], ...methods.map((name) => [name, `${name}, all budgets`])], state.method, set("method")),
        state.method ? null : choice("budget", plain(budgets), state.budget, set("budget"))),
      el("p", { class: "key" }, "found: 0%", el("span", { class: "ramp heat" }), "100%; ! marks cells where every run failed"),
      el("div", { class: "tiles" }, shownMaps.map(heatTile)));
  };
  render();
  return section("needle-maps", "Needle by depth and length", "Each cell: share of the needles that the model gave back, in percent.", holder);
}
