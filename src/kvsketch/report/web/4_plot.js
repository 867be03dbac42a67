// One plot of lines with intervals: axes, grid, markers, a legend that hides and shows, values under the pointer.
const FRAME = { left: 64, right: 16, top: 10, bottom: 44 };
const HEIGHT = 380;

// Values at which a scale is labelled: powers of two or 1, 2, 5 times powers of ten where it is logarithmic, else round
// steps.
function ticks(low, high, logarithmic, most, base = 10) {
  if (!logarithmic) return steps(low, high, most);
  const marks = base === 10 && high / low < 1e4 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high * 1.001; power++)
    for (const mark of marks) found.push(mark * base ** power);
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  if (inside.length < 2) return steps(low, high, most);
  return inside.filter((_, at) => at % Math.ceil(inside.length / most) === 0);
}
function steps(low, high, most) {
  const rough = (high - low || 1) / Math.max(most - 1, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((part) => part * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

function scale(low, high, from, to, logarithmic) {
  const bend = logarithmic ? Math.log : (value) => value;
  const width = bend(high) - bend(low) || 1;
  return (value) => from + ((bend(value) - bend(low)) / width) * (to - from);
}

function extent(values, logarithmic, floor = null) {
  const usable = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
  if (!usable.length) return logarithmic ? [0.1, 1] : [0, 1];
  let [low, high] = [Math.min(...usable), Math.max(...usable)];
  if (logarithmic) return [low / 1.12, high * 1.12];
  if (floor !== null) low = Math.min(low, floor);
  const margin = (high - low || Math.abs(high) || 1) * 0.04;
  return [low === floor ? low : low - margin, high + margin];
}

// series: [{name, method, points: [{x, y, low, high, tip}], level}]; a level is a line across, without points.
function plot(series, options) {
  const hidden = options.hidden || new Set();
  const holder = el("div", { class: "chart" });
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Methods shown" });
  const draw = () => {
    const width = Math.max(280, Math.min(1100, holder.clientWidth - 20 || 900));
    holder.replaceChildren(drawing(series.filter((line) => !hidden.has(line.name)), series, options, width));
  };
  const toggle = (line) => {
    if (hidden.has(line.name)) hidden.delete(line.name); else hidden.add(line.name);
    update();
  };
  const fade = (name) => holder.querySelectorAll(".series").forEach((group) =>
    group.classList.toggle("faded", name !== null && group.dataset.name !== name));
  const keys = series.map((line) => el("button", {
    type: "button", "data-name": line.name, onclick: () => toggle(line),
    onmouseenter: () => fade(line.name), onmouseleave: () => fade(null),
  }, swatch(line.method), line.name));
  const all = el("button", { type: "button", class: "all", onclick: () => {
    if (hidden.size) hidden.clear(); else series.forEach((line) => hidden.add(line.name));
    update();
  } });
  function update() {
    keys.forEach((key) => key.setAttribute("aria-pressed", String(!hidden.has(key.dataset.name))));
    all.textContent = hidden.size ? "show all" : "hide all";
    draw();
  }
  legend.append(...keys, all);
  update();
  let drawn = 0;
  new ResizeObserver(() => {
    if (Math.abs(holder.clientWidth - drawn) > 4) { drawn = holder.clientWidth; draw(); }
  }).observe(holder);
  return [holder, legend];
}

function swatch(method) {
  return svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, style: `stroke:${colour(method)};stroke-width:2`, "stroke-dasharray": look(method).dash }),
    marker(method, 13, 6, 3.5));
}

function drawing(visible, series, options, width) {
  const points = series.flatMap((line) => line.points);
  const levels = series.filter((line) => line.level).map((line) => line.level.y);
  const [xLow, xHigh] = extent(points.map((point) => point.x), options.xLog);
  const heights = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]).concat(levels);
  const [yLow, yHigh] = extent(heights, options.yLog, options.yFloor ?? null);
  const right = width - FRAME.right, height = options.height || HEIGHT, bottom = height - FRAME.bottom;
  const x = scale(xLow, xHigh, FRAME.left, right, options.xLog);
  const y = scale(yLow, yHigh, bottom, FRAME.top, options.yLog);
  const place = { x, y, right, bottom, xLow, xHigh, yLow, yHigh, width, height };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
  root.append(...axes(place, options), ...visible.map((line, at) => drawLine(line, place, dodge(at, visible, width))));
  const near = visible.flatMap((line) => line.points.map((point) => ({ point, line })));
  root.addEventListener("pointermove", (event) => pointAt(event, root, near, place));
  root.addEventListener("pointerleave", hideTip);
  return root;
}

function axes(place, options) {
  const { x, y, right, bottom } = place;
  const across = options.xTicks || ticks(place.xLow, place.xHigh, options.xLog, place.width < 500 ? 4 : 10, options.xBase);
  const up = ticks(place.yLow, place.yHigh, options.yLog, 7);
  return [
    ...up.flatMap((value) => [
      svg("line", { class: "grid", x1: FRAME.left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: FRAME.left - 8, y: y(value) + 4, "text-anchor": "end" }, options.yText(value)),
    ]),
    ...across.flatMap((value) => [
      svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 5 }),
      svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, options.xText(value)),
    ]),
    svg("line", { class: "axis", x1: FRAME.left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { x: (FRAME.left + right) / 2, y: place.height - 6, "text-anchor": "middle" }, options.xLabel),
    svg("text", { x: 0, y: 0, transform: `translate(12,${(FRAME.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.yLabel),
  ];
}

// Lines whose points share places are set side by side by a hair, so that their intervals can be told apart.
function dodge(at, visible, width) {
  const gap = visible.some((line) => line.points.some((point) => point.low !== null)) ? Math.min(3, width / 36 / visible.length) : 0;
  return (at - (visible.length - 1) / 2) * gap;
}

function drawLine(line, { x: place, y, right }, shift) {
  const x = (value) => place(value) + (line.bare ? 0 : shift);
  const group = svg("g", { class: "series", "data-name": line.name });
  const stroke = `stroke:${colour(line.method)};fill:none`;
  if (line.level) {
    group.append(svg("line", { x1: FRAME.left, x2: right, y1: y(line.level.y), y2: y(line.level.y), style: `${stroke};stroke-width:1.5`, "stroke-dasharray": "6 4" }));
  }
  const whole = line.points.filter((point) => Number.isFinite(y(point.y)) && Number.isFinite(x(point.x)));
  for (const point of whole) {
    if (point.low === null || point.low === undefined || !Number.isFinite(y(point.low))) continue;
    group.append(svg("line", { x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high), style: `${stroke};stroke-width:1.2;opacity:.55` }));
  }
  const path = whole.map((point, at) => `${at ? "L" : "M"}${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join("");
  group.append(svg("path", { d: path, style: `${stroke};stroke-width:1.8`, "stroke-dasharray": look(line.method).dash || null }));
  if (!line.bare) whole.forEach((point) => group.append(marker(line.method, x(point.x), y(point.y), 3.6)));
  return group;
}

function pointAt(event, root, near, { x, y, width }) {
  const box = root.getBoundingClientRect();
  const size = width / box.width;
  const [px, py] = [(event.clientX - box.left) * size, (event.clientY - box.top) * size];
  let best = null, least = 28 ** 2;
  for (const found of near) {
    const distance = (x(found.point.x) - px) ** 2 + (y(found.point.y) - py) ** 2;
    if (distance < least) [best, least] = [found, distance];
  }
  if (best) showTip(best.point.tip, event.clientX, event.clientY); else hideTip();
}
