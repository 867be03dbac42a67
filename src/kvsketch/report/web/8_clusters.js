// Clusterability: keys and values of a head in the plane with their k-center marks; radii, cluster counts, query norms.
function scatter(name, part) {
  const size = 300, margin = 8;
  const [xs, ys] = [0, 1].map((axis) => part.points.map((point) => point[axis]));
  const x = scale(Math.min(...xs), Math.max(...xs), margin, size - margin, false);
  const y = scale(Math.min(...ys), Math.max(...ys), size - margin, margin, false);
  const centers = new Set(part.centers);
  const root = svg("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `${name} of one head in the plane, ${part.points.length} points, ${part.centers.length} centers marked` });
  const dots = part.points.map((point, at) => centers.has(at) ? "" : `M${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}h0`).join("");
  root.append(svg("path", { d: dots, style: `stroke:${colour(name)};stroke-width:2.6;stroke-linecap:round;opacity:.5;fill:none` }));
  for (const at of part.centers) {
    const [px, py] = [x(part.points[at][0]), y(part.points[at][1])];
    root.append(svg("path", { d: "M-5,-5L5,5M-5,5L5,-5", transform: `translate(${px},${py})`, style: "stroke:var(--raised);stroke-width:5;fill:none" }),
      svg("path", { d: "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5", transform: `translate(${px},${py})`, style: "stroke:var(--ink);stroke-width:2;fill:none" }));
  }
  return el("div", { class: "tile" }, el("h3", {}, name), root);
}

function clusterLines(curves, fields) {
  return ["keys", "values"].map((name) => ({
    name, method: name, level: null,
    points: Object.entries(curves[name] || {}).map(([x, y]) => ({ x: Number(x), y, low: null, high: null, tip: `${name}\n${fields.x} ${number(Number(x))}\n${fields.y}: ${number(y)}` })).sort((a, b) => a.x - b.x),
  }));
}

function clusterSection(models) {
  const state = { model: "0", layer: "" };
  const holder = el("div", {});
  const radius = { x: "centers", y: "radius, share of the radius of one center" };
  const counts = { x: "delta, in spreads", y: "clusters that a stream opens" };
  const render = () => {
    const model = models[Number(state.model)];
    const layers = model.layers.map((each) => String(each.layer));
    if (!layers.includes(state.layer)) state.layer = (model.layers.find((each) => each.tsne) || model.layers[0]).layer + "";
    const layer = model.layers.find((each) => String(each.layer) === state.layer);
    const set = (name) => (value) => { state[name] = value; render(); };
    const line = (curves, fields, xLog) => plot(clusterLines(curves, fields), {
      xLog, xBase: 2, height: 300, yLog: true, xText: (value) => number(value), yText: (value) => number(value), xLabel: fields.x, yLabel: fields.y,
      label: `${fields.y} against ${fields.x}, for keys and values`,
    });
    holder.replaceChildren(
      controls(choice("model", models.map((each, at) => [String(at), each.name]), state.model, set("model")),
        choice("layer", layers.map((name) => [name, `${name}${model.layers.find((each) => String(each.layer) === name).tsne ? " (with picture)" : ""}`]), state.layer, set("layer"))),
      layer.tsne ? el("div", { class: "tiles two" }, ["keys", "values"].map((name) => scatter(name, layer.tsne[name])))
        : el("p", { class: "hint" }, "No picture was drawn of this layer."),
      el("p", { class: "hint" }, layer.tsne ? `t-SNE of KV head ${layer.tsne.head}; crosses: the centers of greedy k-center, chosen in the space of the vectors. ` : "",
        `Mean length of the queries ${number(layer.query_norm.mean, 5)} [${number(layer.query_norm.low, 5)}, ${number(layer.query_norm.high, 5)}].`),
      el("div", { class: "tiles two" },
        el("div", {}, el("h3", {}, `Radius of k-center, layer ${state.layer}, mean over heads`), line(layer.radius, radius, true)),
        el("div", {}, el("h3", {}, `Clusters by distance, layer ${state.layer}, mean over heads`), line(layer.clusters, counts, false))));
  };
  render();
  return section("clusters", "Do keys cluster, do values?",
    "Keys that cluster well have a radius that falls fast with the number of centers, and open few clusters.", holder);
}
