// The token view: a document, each token shaded by the share of steps it stayed in the cache.
function tokenSection(documents) {
  const label = (life) => `${life.method} ${life.budget}`.trim();
  const state = { document: "0", life: "", layer: "", head: "" };
  const holder = el("div", {});
  const text = el("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Document" });
  const summary = el("span", {});
  const layerName = (view) => (view.layer === null ? "mean of all" : `layer ${view.layer}`);

  function render() {
    const found = documents[Number(state.document)];
    const names = found.lives.map(label);
    if (!names.includes(state.life)) state.life = names.find((name) => !name.startsWith("full")) || names[0];
    const life = found.lives[names.indexOf(state.life)];
    const layers = unique(life.views.map(layerName));
    if (!layers.includes(state.layer)) state.layer = layers[0];
    const inLayer = life.views.filter((view) => layerName(view) === state.layer);
    const heads = inLayer.map((view) => (view.head === null ? "all" : String(view.head)));
    if (!heads.includes(state.head)) state.head = heads[0];
    const view = inLayer[heads.indexOf(state.head)];
    const set = (name) => (value) => { state[name] = value; render(); };
    holder.replaceChildren(
      controls(
        choice("document", documents.map((each, at) => [String(at), each.name]), state.document, set("document")),
        choice("method and budget", plain(names), state.life, set("life"), true),
        choice("layer", plain(layers), state.layer, set("layer"), true),
        choice("KV head", heads.map((head) => [head, head]), state.head, set("head"), true)),
      el("p", { class: "key" }, life.measures === "read" ? "read in no step" : "left at once",
        el("span", { class: "ramp token" }), life.measures === "read" ? "in every step" : "stayed to the end", summary), text);
    shade(found, life, view);
  }
  function shade(found, life, view) {
    const verb = life.measures === "read" ? "was read in" : "stayed for";
    const marked = new Set(found.marked);
    text.replaceChildren(...found.words.map((word, at) => {
      const share = view.shares[at] / 100;
      return el("span", {
        class: marked.has(at) ? "marked" : null, "data-share": view.shares[at],
        style: `background:color-mix(in srgb, var(--accent) ${Math.round(48 * share)}%, transparent)`,
      }, word);
    }));
    const kept = view.shares.filter((share) => share === 100).length;
    summary.textContent = `${kept} of ${found.words.length} tokens ${verb} every step`
      + (found.marked.length ? "; underlined: the pass key" : "");
  }
  text.addEventListener("pointermove", (event) => {
    const share = event.target.dataset ? event.target.dataset.share : undefined;
    if (share === undefined) return hideTip();
    showTip(`${share}% of the steps since it was read`, event.clientX, event.clientY);
  });
  text.addEventListener("pointerleave", hideTip);
  render();
  return section("tokens", "How long tokens stay",
    "A real model reads the document step by step. The stronger the shade of a token, the more of the steps after it "
    + "a slot still carried it; for recall methods, which keep every token, the more of the steps read it.", holder);
}
