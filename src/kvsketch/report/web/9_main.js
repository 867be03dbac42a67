// The page: its sections in order, the contents, the colour scheme.
function schemeButton() {
  const root = document.documentElement, button = document.getElementById("scheme");
  const dark = () => (root.dataset.scheme ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "light scheme" : "dark scheme"; };
  button.addEventListener("click", () => { root.dataset.scheme = dark() ? "light" : "dark"; name(); });
  name();
}

function provenanceSection() {
  const runs = DATA.provenance.map((run) => el("li", {}, el("code", {}, run.command), el("p", { class: "hint" },
    [`${run.file}, ${number(run.records, 9)} records`, run.seeds ? `seeds ${run.seeds}` : "", run.model, run.machine, `commit ${run.commit}`, run.versions, run.dates]
      .filter(Boolean).join(" · "))));
  const remarks = DATA.remarks.length ? el("ul", { class: "failures" }, DATA.remarks.map((remark) => el("li", {}, remark))) : null;
  return section("provenance", "Where the numbers come from", "Every number on this page is computed from these records.", el("ul", { class: "runs" }, runs), remarks);
}

function failureList(rows) {
  // A failed run counts in every setting it belongs to; it is told once.
  const failed = rows.filter((row) => row.failed && row.tells_failures);
  if (!failed.length) return null;
  return el("details", {}, el("summary", { class: "failed" }, `${failed.reduce((sum, row) => sum + row.failed, 0)} measurements failed`),
    el("ul", { class: "failures" }, failed.map((row) => el("li", {}, `${row.failed}: ${row.title}, ${row.model}, ${row.setting ? `${row.setting}, ` : ""}${row.method} ${row.budget}: ${row.failures.join("; ")}`))));
}

function page() {
  const main = document.getElementById("main");
  const rows = DATA.experiments.flatMap((experiment) => experiment.rows.map((row) => ({ ...row, title: experiment.title, measure: experiment.measure, percent: experiment.share })));
  if (rows.length) {
    main.append(section("results", "All results",
      "Means with bootstrap 95% intervals over samples. Memory is measured, index and weights included. Failed runs are counted beside the mean, not in it.",
      resultsTable(rows), failureList(rows)));
  }
  if (rows.length) main.prepend(glanceSection(DATA.experiments));
  const positions = new Map(DATA.positions.map((group) => [group.kind, group]));
  for (const experiment of DATA.experiments) {
    main.append(experimentCurves(experiment));
    if (experiment.kind === "needle" && DATA.needle.length) main.append(needleSection(DATA.needle));
    if (positions.has(experiment.kind)) main.append(positionCurves(positions.get(experiment.kind)));
  }
  if (DATA.documents.length) main.append(tokenSection(DATA.documents));
  if (DATA.clusters.length) main.append(clusterSection(DATA.clusters));
  main.append(provenanceSection());
  document.getElementById("contents").append(...[...main.querySelectorAll("section")].map((part) =>
    el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)));
}

schemeButton();
page();
