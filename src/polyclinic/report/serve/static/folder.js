// The page of a folder: everything in it, one run, one comparison, or chosen runs side by side.

import { lineChart, narrow } from "/charts.js";
import { attempt, bytes, count, duration, get, make, number, poll, post, progressBar, say, show, table, takeToken, when } from "/shared.js";

const chosen = new Set();
let filter = "";
let curve = "";
const form = { study: "", name: "" }; // what was typed, so that it survives a new drawing

const link = (kind, name, words = name) => make("a", { href: `#/${kind}/${encodeURIComponent(name)}`, "data-key": `${kind} ${name}` }, words);

function route() {
  const [, kind = "", ...rest] = location.hash.split("/");
  const name = decodeURIComponent(rest.join("/"));
  return { kind, name };
}

let drawn = "";

/** Ask, and draw if there is news: what has not changed stays as it is, with the reader's place in it. */
async function refresh(always = true) {
  const { kind, name } = route();
  const [ask, draw] = PAGES[kind] || PAGES[""];
  const found = await attempt(() => ask(name));
  const text = location.hash + JSON.stringify(found);
  if (!found || kind !== route().kind || name !== route().name || (text === drawn && !always)) return;
  if (!always && document.activeElement?.tagName === "SELECT") return;
  drawn = text;
  show(...draw(found, name).filter(Boolean));
}

function heading(title, words) {
  document.getElementById("title").textContent = title;
  document.title = `${title} · Polyclinic`;
  document.getElementById("nav").replaceChildren(route().kind ? make("a", { href: "#/" }, "All runs") : words || "");
}

// --- everything ---------------------------------------------------------------------------------

function overviewPage(found) {
  heading(`Runs in ${found.folder}`, `version ${found.version}`);
  const running = found.runs.filter((run) => run.state === "running");
  const jobs = found.jobs.filter((job) => job.state === "failed");
  return [
    ...(running.length ? [make("h2", {}, "At work now"), make("div", { class: "cards" }, running.map(card))] : []),
    ...jobs.map((job) => make("p", { class: "bad" }, `${job.kind} ${job.name} failed: ${job.words}`)),
    make("h2", {}, "Runs"), filterRow(found.runs), make("div", { id: "runs" }, runsTable(found.runs)),
    found.cut ? make("p", { class: "quiet" }, "There are more; only the first thousand entries are listed.") : null,
    make("h2", {}, "Comparisons"), comparisonsTable(found.comparisons),
    make("h2", {}, "Start a run"), startForm(found.studies),
  ];
}

function card(run) {
  const words = `${run.rounds_done} of ${run.rounds} rounds`;
  return make("section", { class: "card" }, make("h3", {}, link("run", run.name)),
    make("p", {}, `${run.method}, seed ${run.seed}`), make("p", {}, progressBar(run.rounds_done, run.rounds, words), ` ${words}`),
    make("p", { class: "quiet" }, [left(run), `${bytes(run.bytes)} carried`].filter(Boolean).join("; ")),
    run.ours ? stopButton(run.name) : null);
}

const left = (run) => (typeof run.seconds_left === "number" ? `about ${duration(run.seconds_left)} left` : "");

function filterRow(runs) {
  const typed = (event) => {
    filter = event.target.value;
    document.getElementById("runs").replaceChildren(runsTable(runs));
  };
  const field = make("input", { id: "filter", type: "search", value: filter, oninput: typed, "data-key": "filter" });
  const compare = () => { location.hash = `#/compare/${encodeURIComponent([...chosen].join("\n"))}`; };
  const button = make("button", { type: "button", id: "compare", onclick: compare, disabled: chosen.size < 2, "data-key": "compare" },
    `Compare ${chosen.size} chosen runs`);
  return make("p", { class: "row" }, make("label", { for: "filter" }, "Show runs whose name or method contains"), field, button);
}

function runsTable(runs) {
  const wanted = runs.filter((run) => `${run.name} ${run.method}`.toLowerCase().includes(filter.toLowerCase()));
  return table("runs", `${wanted.length} of ${count(runs.length, "run")}`, [
    ["Choose", checkbox, "pick"],
    ["Run", (run) => link("run", run.name), "long"],
    ["Method", (run) => run.method],
    ["Seed", (run) => String(run.seed), "number"],
    ["State", stateCell],
    ["Rounds", (run) => `${run.rounds_done ?? ""} of ${run.rounds ?? "?"}`, "number"],
    ["Figures", figures],
    ["Carried", (run) => bytes(run.bytes), "number"],
    ["Epsilon", (run) => number(run.epsilon), "number"],
    ["Changed", (run) => when(run.changed)],
  ], wanted, runs.length ? "No run has this in its name or method." : "There is no run in this folder yet.");
}

function checkbox(run) {
  const changed = (event) => {
    event.target.checked ? chosen.add(run.name) : chosen.delete(run.name);
    const button = document.getElementById("compare");
    button.disabled = chosen.size < 2;
    button.textContent = `Compare ${chosen.size} chosen runs`;
  };
  return make("input", { type: "checkbox", checked: chosen.has(run.name), onchange: changed, "aria-label": `choose ${run.name}`,
    "data-key": `choose ${run.name}` });
}

const stateCell = (run) => make("span", { class: { finished: "good", stopped: "quiet" }[run.state] || "" }, run.state);

function figures(run) {
  const found = Object.entries(run.metrics).filter(([name]) => name !== "loss").slice(0, 3);
  return found.length ? `${run.images}: ${found.map(([name, value]) => `${name} ${number(value)}`).join(", ")}` : "";
}

function comparisonsTable(rows) {
  return table("comparisons", count(rows.length, "comparison"), [
    ["Comparison", (row) => link("comparison", row.name), "long"],
    ["Methods", (row) => row.methods.join(", ")],
    ["State", (row) => (row.finished ? "finished" : "not finished")],
  ], rows, "There is no comparison in this folder yet: `polyclinic compare` makes one.");
}

function startForm(studies) {
  if (!studies.length) return make("p", { class: "quiet" }, "There is no study file in this folder: `polyclinic study new` writes one.");
  const study = make("select", { id: "study", "data-key": "study" }, studies.map((name) => make("option", { value: name }, name)));
  const name = make("input", { id: "name", size: 24, maxlength: 100, "data-key": "name" });
  if (studies.includes(form.study)) study.value = form.study;
  name.value = form.name;
  study.addEventListener("change", () => { form.study = study.value; });
  name.addEventListener("input", () => { form.name = name.value; });
  const start = () => attempt(async () => {
    const made = await post("/api/start", { study: study.value, name: name.value || null });
    form.name = "";
    location.hash = `#/run/${encodeURIComponent(made.name)}`;
  }, "started");
  return make("div", {},
    make("p", { class: "quiet" }, "A study may name plug-ins: Python code that runs on this machine with your rights. Start only studies that you trust."),
    make("p", { class: "row" }, make("label", { for: "study" }, "Study"), study, make("label", { for: "name" }, "Name of the run (optional)"), name,
      make("button", { type: "button", onclick: start, "data-key": "start" }, "Start")));
}

function stopButton(name) {
  const stop = () => confirm(`Stop the run ${name}? It can go on later.`) && attempt(() => post("/api/stop", { name }), "The run is being stopped.").then(() => refresh());
  return make("p", {}, make("button", { type: "button", class: "stop", onclick: stop, "data-key": `stop ${name}` }, "Stop this run"));
}

// --- one run ------------------------------------------------------------------------------------

function runPage(run, name) {
  heading(name);
  const job = (run.jobs || []).find((one) => one.kind === "run");
  if (run.starting) return startingPage(name, job);
  return [
    make("h2", {}, "Where it stands"), standing(run, job), ...warnings(run),
    make("h2", {}, "How good the model is"), ...curves(run),
    run.state === "finished" ? finalTable(run) : null,
    make("h2", {}, "What left each site"), ...whatLeft(run),
    run.failed.length ? make("h2", {}, "Sites that failed") : null,
    run.failed.length ? table("failed", "The last failures", [["Round", (one) => String(one.round), "number"], ["Site", (one) => one.site],
      ["Why", (one) => one.reason, "long"]], run.failed) : null,
    ...reportPart(run), ...filesPart(run.files),
  ];
}

/** A run that was started a moment ago has no files yet. */
function startingPage(name, job) {
  const words = { failed: `It failed: ${job.words}`, stopped: "It was stopped before its first round.", stopping: "It is being stopped." };
  return [make("h2", {}, "Starting"), make("p", {}, words[job.state] || "The images are being prepared."), job.state === "at work" ? stopButton(name) : null];
}

function standing(run, job) {
  const words = `${run.rounds_done} of ${run.rounds} rounds`;
  const rows = [["State", job && job.state !== "done" && run.state === "running" && job.state === "stopping" ? "stopping" : run.state],
    ["Method", `${run.method}, seed ${run.seed}`], ["Task and images", `${run.task}, ${run.source}`],
    ["Rounds", make("span", {}, progressBar(run.rounds_done, run.rounds, words), ` ${words}`)], ["Time left", left(run)],
    ["At work", atWork(run)], ["Carried so far, both ways", bytes(run.bytes)], ["Released model", released(run)], ["Privacy", privacy(run.privacy)]];
  const shown = rows.filter(([, value]) => value);
  const list = make("table", {}, make("tbody", {}, shown.map(([term, value]) => make("tr", {}, make("th", { scope: "row" }, term), make("td", {}, value)))));
  const resume = () => attempt(() => post("/api/resume", { name: run.name }), "The run goes on.").then(() => refresh());
  const failed = job && job.state === "failed" ? make("p", { class: "bad" }, `It failed: ${job.words}`) : null;
  return make("div", {}, make("div", { class: "wide" }, list), failed,
    run.state === "running" && job && ["at work", "stopping"].includes(job.state) ? stopButton(run.name) : null,
    run.state === "running" && !job ? make("p", { class: "quiet" }, "This run was started elsewhere; stop it there.") : null,
    run.state === "stopped" ? make("p", {}, make("button", { type: "button", onclick: resume, "data-key": "resume" }, "Go on with this run")) : null);
}

function atWork({ at_work: now, sites }) {
  if (!now.sites || !now.operation) return "";
  const who = now.sites.length > 6 ? `${now.sites.length} of ${sites.length} sites` : now.sites.join(", ");
  return `round ${now.round}: ${who} (${now.operation})`;
}

const released = (run) => (run.selected_round ? `that of round ${run.selected_round}` : "");

function privacy(found) {
  if (!found) return "";
  const uncovered = found.does_not_cover.length ? `; it does not cover ${found.does_not_cover.join("; ")}` : "";
  return `epsilon ${number(found.epsilon)} at delta ${number(found.delta)} covers ${found.covers.join(", ") || "nothing"}${uncovered}`;
}

const warnings = (run) => run.warnings.map((words) => make("p", { class: "bad" }, `Warning: ${words}`));

const chosenMetric = (names, own) => [curve, own, names[0]].find((name) => names.includes(name));

function metricRow(names, metric) {
  const changed = (event) => { curve = event.target.value; refresh(); };
  const pick = make("select", { id: "metric", "data-key": "metric", onchange: changed },
    names.map((name) => make("option", { value: name, selected: name === metric }, name)));
  return make("p", { class: "row" }, make("label", { for: "metric" }, "Metric on validation images"), pick);
}

const pointsOf = (run, values) => run.curves.scored.map((round, at) => [round, values?.[at] ?? NaN]);

function curves(run) {
  const names = Object.keys(run.curves.pooled);
  if (!names.length) return [make("p", { class: "quiet" }, run.state === "finished" ? "No round was scored on validation images." :
    "No round has been scored yet.")];
  const metric = chosenMetric(names, run.metric);
  const lines = [{ name: "all sites together", points: pointsOf(run, run.curves.pooled[metric]) },
    ...Object.entries(run.curves.per_site).slice(0, 12).map(([site, found]) => ({ name: site, points: pointsOf(run, found[metric]) }))];
  const many = Object.keys(run.curves.per_site).length > 12 ? make("p", { class: "quiet" }, "The first twelve sites are drawn.") : null;
  return [metricRow(names, metric),
    make("div", { class: "charts" },
      lineChart({ key: "metric", title: `Validation ${metric} by round`, xLabel: "round", yLabel: metric, lines }),
      lineChart({ key: "bytes", title: "Bytes carried so far", xLabel: "round", yLabel: "bytes", format: bytes, zero: true,
        lines: [{ name: "all sites together", points: run.curves.rounds.map((round, at) => [round, run.curves.bytes[at] ?? NaN]) }] }) || ""), many];
}

function finalTable(run) {
  const names = Object.keys(run.metrics);
  const rows = [["all sites together", run.metrics], ...Object.entries(run.per_site)];
  return table("final", `The released model on ${run.images} images`, [["Site", ([site]) => site],
    ...names.map((name) => [name, ([, found]) => number(found[name]), "number"])], rows);
}

function whatLeft(run) {
  return [table("left", `${bytes(run.left.reduce((sum, row) => sum + row.bytes, 0))} left the sites, by their ledgers`, [
    ["Site", (row) => row.site], ["Kind", (row) => row.kind], ["Parcels", (row) => String(row.parcels), "number"],
    ["Bytes", (row) => bytes(row.bytes), "number"]], run.left, "Nothing has left a site yet.")];
}

function reportPart(entry) {
  const job = (entry.jobs || []).find((one) => one.kind === "report");
  const file = entry.files.find((one) => one.file === "report.html");
  if (!file && entry.state && entry.state !== "finished") return [];
  const makeIt = () => attempt(() => post("/api/report", { name: entry.name }), "The report is being made.").then(() => refresh());
  const atWorkNow = job && job.state === "at work";
  return [make("h2", {}, "Report"), make("p", { class: "row" },
    file ? make("a", { href: file.url, target: "_blank", rel: "noopener noreferrer", "data-key": "report" }, "Open the report") : null,
    make("button", { type: "button", disabled: atWorkNow, onclick: makeIt, "data-key": "make report" },
      atWorkNow ? "The report is being made" : file ? "Make it again" : "Make the report")),
    job && job.state === "failed" ? make("p", { class: "bad" }, `The report was not made: ${job.words}`) : null];
}

function filesPart(files) {
  const pictures = files.filter((file) => file.picture).slice(0, 60);
  const saved = (file) => make("a", { href: `${file.url}&save=1`, "data-key": `file ${file.file}` }, file.file);
  return [pictures.length ? make("h2", {}, "Pictures") : null,
    pictures.length ? make("div", { class: "pictures" }, pictures.map((file) => make("figure", {},
      make("a", { href: file.url, target: "_blank", rel: "noopener noreferrer" }, make("img", { src: file.url, alt: file.file, loading: "lazy" })),
      make("figcaption", {}, saved(file))))) : null,
    make("h2", {}, "Files"),
    make("details", { "data-key": "files", open: files.length < 12 }, make("summary", {}, count(files.length, "file")),
      table("files", "To take away", [["File", saved, "long"], ["Size", (file) => bytes(file.bytes), "number"]], files))];
}

// --- a comparison, and chosen runs ----------------------------------------------------------------

function comparisonPage(found, name) {
  heading(name);
  const methods = Object.entries(found.methods || {});
  const metrics = [...new Set(methods.flatMap(([, one]) => Object.keys(one)))].filter((key) => key.startsWith("test_") && key !== "test_loss");
  const spread = (one) => (one ? `${number(one.mean)}${one.n > 1 ? ` ± ${number(one.std)}` : ""}` : "");
  const all = () => { location.hash = `#/compare/${encodeURIComponent(found.runs.map((run) => run.name).slice(0, 20).join("\n"))}`; };
  return [
    make("h2", {}, "Methods, mean ± standard deviation over seeds"),
    table("methods", "The released models on test images", [["Method", ([method]) => method],
      ["Runs", ([, one]) => String(Object.values(one)[0]?.n ?? ""), "number"],
      ...metrics.map((key) => [key.slice(5), ([, one]) => spread(one[key]), "number"]),
      ["Carried", ([, one]) => bytes(one.total_bytes?.mean && Math.round(one.total_bytes.mean)), "number"]], methods, "The comparison is not finished."),
    make("h2", {}, "Runs"), runsTable(found.runs),
    make("p", {}, make("button", { type: "button", onclick: all, "data-key": "all" }, "Show their curves side by side")),
    ...reportPart({ ...found, state: found.methods ? "finished" : "running" }), ...filesPart(found.files),
  ];
}

function comparePage(found) {
  heading(`${found.runs.length} runs side by side`);
  const shared = [...new Set(found.runs.flatMap((run) => Object.keys(run.curves.pooled)))];
  const metric = chosenMetric(shared, found.runs.map((run) => run.metric).find(Boolean));
  const lines = found.runs.map((run) => ({ name: run.name, points: pointsOf(run, run.curves.pooled[metric]) }));
  const byBytes = found.runs.map((run) => ({ name: run.name, points: run.curves.scored.map((round, at) =>
    [(run.curves.bytes[run.curves.rounds.indexOf(round)] ?? NaN) / 1e6, run.curves.pooled[metric]?.[at] ?? NaN]) }));
  const metrics = [...new Set(found.runs.flatMap((run) => Object.keys(run.metrics)))];
  const charts = metric ? [lineChart({ key: "metric", title: `Validation ${metric} by round`, xLabel: "round", yLabel: metric, lines }),
    lineChart({ key: "bytes", title: `Validation ${metric} by bytes carried`, xLabel: "megabytes carried", yLabel: metric, lines: byBytes, whole: false })] : [];
  return [
    metric ? metricRow(shared, metric) :
      make("p", { class: "quiet" }, "None of these runs has been scored yet."),
    make("div", { class: "charts" }, charts.filter(Boolean)),
    make("h2", {}, "Figures"),
    table("compared", "Of the released model, or of the last round that was scored", [["Run", (run) => link("run", run.name), "long"], ["Method", (run) => run.method],
      ["State", stateCell], ["Images", (run) => run.images],
      ...metrics.map((name) => [name, (run) => number(run.metrics[name]), "number"]), ["Carried", (run) => bytes(run.bytes), "number"],
      ["Epsilon", (run) => number(run.epsilon), "number"]], found.runs),
  ];
}

const PAGES = {
  "": [() => get("/api/overview"), overviewPage],
  run: [(name) => get("/api/run", { name }), runPage],
  comparison: [(name) => get("/api/comparison", { name }), comparisonPage],
  compare: [(text) => get("/api/compare", { name: text.split("\n").filter(Boolean) }), comparePage],
};

takeToken();
const turn = poll(() => refresh(false), 2);
window.addEventListener("hashchange", () => { takeToken(); say(""); window.scrollTo(0, 0); turn(); });
turn();
narrow.addEventListener("change", () => refresh());
