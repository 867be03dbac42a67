"use strict";
// Elements, numbers in words, the tip, and controls that every section uses.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (name, attributes, ...children) => build(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => build(document.createElementNS(SVG, name), attributes, children);

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`);
const megabytes = (bytes) => (bytes === null || bytes === undefined ? "–" : `${(bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0)} MB`);
const shown = (value, share) => (share ? percent(value) : number(value));
function withInterval(row, share) {
  if (row.mean === null) return "no value";
  const edges = row.low === null ? "" : ` [${shown(row.low, share)}, ${shown(row.high, share)}]`;
  return shown(row.mean, share) + edges;
}
const memoryOf = (row) => (row.device_bytes === null ? null : row.device_bytes + (row.host_bytes || 0));
const unique = (values) => [...new Set(values)];
// Models of which more was measured come first, in every section.
const modelsOf = (items) => unique(items.map((item) => item.model)).sort((a, b) => modelRank(a) - modelRank(b));
const modelRank = (name) => DATA.models.indexOf(name.split(";")[0]);

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y - box.height - 12 > 6 ? y - box.height - 12 : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

// A labelled choice; one that leaves nothing to choose is not shown. It calls back with the value.
function choice(label, options, chosen, change, shownAlways = false) {
  if (options.length < 2 && !shownAlways) return null;
  const select = el("select", { name: label, onchange: () => {
    const home = select.closest("section");
    change(select.value);
    // A choice may draw its section anew; who chose by keyboard stays where they were.
    const again = [...home.querySelectorAll("select")].find((each) => each.name === label);
    if (again) again.focus();
  } },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  select.value = chosen;
  return field(label, select, LONG.includes(label) ? "long" : "");
}
const LONG = ["model", "document"];  // names of which a phone shows one in a line
let fields = 0;
function field(label, control, kind = "") {
  control.id = `field-${++fields}`;
  return el("div", { class: `field ${kind}` }, el("label", { for: control.id }, label), control);
}
const plain = (values) => values.map((value) => [value, value]);
const controls = (...items) => el("div", { class: "controls" }, items);

function section(id, title, text, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), text ? el("p", { class: "text" }, text) : null, children);
}

const look = (method) => DATA.methods[method] || { light: "#555555", dark: "#aaaaaa", dash: "", marker: "o", family: "" };
const colour = (method) => `light-dark(${look(method).light}, ${look(method).dark})`;
const PATHS = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  D: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
  v: (r) => `M${-1.2 * r},${-r}h${2.4 * r}L0,${1.2 * r}z`,
  "^": (r) => `M${-1.2 * r},${r}h${2.4 * r}L0,${-1.2 * r}z`,
  "*": (r) => `M${-r},0h${2 * r}M0,${-r}v${2 * r}`,
};
function marker(method, x, y, r = 4) {
  const shape = look(method).marker;
  const paint = shape === "*" ? `stroke:${colour(method)};stroke-width:2` : `fill:${colour(method)}`;
  return svg("path", { d: (PATHS[shape] || PATHS.o)(r), transform: `translate(${x},${y})`, style: paint });
}
