// The page of a hospital's own people: what waits for a decision, what runs, what left, what is left of the budgets.

import { attempt, bytes, count, get, make, number, poll, post, progressBar, say, show, table, takeToken } from "/shared.js";

const opened = new Map(); // run -> what its study asks, as the server says it
const closed = new Set(); // runs that wait, of which somebody has closed it
let who = ""; // the name of the person at this page
const search = { text: "", kind: "", run: "" };
let found = null;

const WORDS = { waiting: "waits for you", approved: "approved", refused: "refused", revoked: "stopped" };
const over = (study) => study.finished && ["approved", "waiting"].includes(study.state); // also where the policy has changed since
const word = (study) => (over(study) ? "finished" : WORDS[study.state]);

let drawn = "";

async function refresh(always = true) {
  const site = await attempt(() => get("/api/site"));
  const text = JSON.stringify(site);
  if (!site || (!always && (text === drawn || document.activeElement?.tagName === "SELECT"))) return;
  drawn = text;
  document.getElementById("title").textContent = `Site ${site.site}`;
  document.title = `${site.site} · Polyclinic`;
  document.getElementById("nav").replaceChildren(`version ${site.version}`);
  const waiting = site.studies.filter((one) => one.state === "waiting" && !over(one));
  const others = site.studies.filter((one) => !waiting.includes(one));
  show(
    make("p", {}, site.running ? "The site's own process runs on this machine." : "The site's own process does not run on this machine."),
    ...site.problems.map((words) => make("p", { class: "bad" }, words)),
    ...site.suspended.map((one) => make("p", { class: "bad" }, `Suspended since ${one.since}, with all studies of this site: ${one.study}: ${one.reason}`)),
    make("h2", {}, `Studies that wait for you (${waiting.length})`),
    waiting.length ? make("div", {}, waiting.map(card)) : make("p", { class: "quiet" }, "Nothing waits for you."),
    make("h2", {}, "Studies that were decided"),
    others.length ? make("div", {}, others.map(card)) : make("p", { class: "quiet" }, "No study was decided yet."),
    stopAll(site),
    ...(site.others.length ? [make("h2", {}, "Runs without a request"), make("div", {}, site.others.map((run) => make("section", { class: "card" },
      make("h3", {}, run.run), left(run))))] : []),
    make("h2", {}, "Budgets over all runs"), budgets(site.budgets),
    make("p", { class: "quiet" }, `Your policy lets out: ${site.kinds.join(", ") || "nothing"} (local/policy.toml).`),
    site.dangerous.length ? make("p", { class: "bad" }, `Dangerous: from ${site.dangerous.join(", ")} images of single patients can be rebuilt.`) : "",
    make("h2", {}, "Search the ledger"), searchForm(site), make("div", { id: "lines" }, lines()),
  );
}

function card(study) {
  return make("section", { class: "card", "data-run": study.run },
    make("h3", {}, study.run, make("span", { class: study.state === "approved" ? "good" : "quiet" },
      ` ${word(study)}${study.at_work ? ", at work now" : ""}`)),
    make("p", { class: "quiet" }, `${study.method}, ${count(study.rounds, "round")}; it came on ${study.since}.`),
    make("p", {}, study.standing), asked(study), left(study), decided(study), buttons(study));
}

/** What the study asks: in short, what the policy will refuse, and all sentences of `polyclinic site show`. Open while it waits. */
function asked(study) {
  const waits = study.state === "waiting" && !over(study);
  const short = make("div", {}, inShort(study.run));
  const body = make("div", {}, sentences(study.run));
  const load = async () => {
    if (opened.has(study.run)) return;
    opened.set(study.run, { short: [], refused: [], sentences: ["One moment ..."] });
    const told = await attempt(() => get("/api/site/study", { run: study.run }));
    if (told) opened.set(study.run, told);
    else opened.set(study.run, { short: [], refused: [], sentences: ["What it asks could not be read."] });
    short.replaceChildren(...inShort(study.run));
    body.replaceChildren(...sentences(study.run));
  };
  const toggled = (event) => {
    closed[event.target.open ? "delete" : "add"](study.run);
    if (event.target.open) load();
  };
  if (waits) load();
  return make("div", {}, short, make("details", { "data-key": `asked ${study.run}`, ontoggle: toggled, open: waits && !closed.has(study.run) },
    make("summary", {}, "What this study asks of you"), body));
}

function inShort(run) {
  const { short, refused } = opened.get(run) || { short: [], refused: [] };
  const line = (text) => {
    const [title, ...rest] = text.split(": ");
    return make("li", { class: text.includes("DANGEROUS") ? "bad" : "" }, make("strong", {}, `${title}: `), rest.join(": "));
  };
  return [
    ...(short.length ? [make("ol", {}, short.map(line))] : []),
    ...(refused.length ? [make("p", { class: "bad" }, "Your policy will refuse this study as it is (the coordinator does not see this list):"),
      make("ul", {}, refused.map((one) => make("li", {}, one)))] : []),
  ];
}

function sentences(run) {
  const parts = [];
  for (const line of opened.get(run)?.sentences || []) {
    if (!line) continue;
    if (!line.startsWith("- ")) parts.push(make("p", {}, line));
    else {
      if (parts.at(-1)?.tagName !== "UL") parts.push(make("ul", {}));
      parts.at(-1).append(make("li", {}, line.slice(2)));
    }
  }
  return parts;
}

function left(run) {
  if (!run.left.length) return make("p", { class: "quiet" }, "Nothing has left for it.");
  return table(`left ${run.run}`, "What left so far", [["Kind", (row) => row.kind], ["Parcels", (row) => String(row.parcels), "number"],
    ["Bytes", (row) => bytes(row.bytes), "number"]], run.left);
}

function decided(study) {
  if (!study.decisions.length) return null;
  return make("details", { "data-key": `decisions ${study.run}` }, make("summary", {}, "Decisions"),
    make("ul", {}, study.decisions.map((one) => make("li", {}, `${one.at}: ${one.decision} by ${one.by || "the ledger alone"}${one.why ? `: ${one.why}` : ""}`))));
}

const reasons = new Map();

function buttons(study) {
  const key = `why ${study.run}`;
  const why = make("input", { id: key, size: 30, maxlength: 1000, "data-key": key, value: reasons.get(study.run) || "",
    oninput: (event) => reasons.set(study.run, event.target.value) });
  const name = make("input", { id: `who ${study.run}`, size: 20, maxlength: 200, "data-key": `who ${study.run}`, value: who, autocomplete: "name",
    oninput: (event) => { who = event.target.value; } });
  const button = (decision, words, question, kind = "") => {
    const named = () => decision !== "approve" || who.trim() || (say("Write your name first: it stands beside the approval.", true), name.focus(), false);
    const decide = () => named() && confirm(question) && attempt(() => post("/api/site/decide", { run: study.run, decision, who, why: reasons.get(study.run) || "" }),
      `${study.run}: ${words.toLowerCase()} is written down.`).then(() => { reasons.delete(study.run); opened.delete(study.run); return refresh(); });
    return make("button", { type: "button", class: kind, onclick: decide, "data-key": `${decision} ${study.run}` }, words);
  };
  const stop = button("revoke", "Stop this study", `Stop ${study.run}? Nothing more of it leaves this site. What left before stays with those who have it.`, "stop");
  const approve = button("approve", "Approve", `Approve ${study.run}? It may then train on your images, and what it asks may leave this site.`);
  const refuse = button("refuse", "Refuse", `Refuse ${study.run}? Nothing of it will run here. The coordinator is told that it was refused, and not why.`);
  const approvedBefore = study.decisions.at(-1)?.decision === "approve";
  const offered = study.state === "approved" ? [stop] : approvedBefore ? [approve, stop] : study.state === "waiting" ? [approve, refuse] : [approve];
  const field = (id, words, input) => make("span", { class: "row" }, make("label", { for: id }, words), input);
  return make("p", { class: "row" }, field(`who ${study.run}`, "Your name", name), field(key, "Your reason (stays here)", why), ...offered);
}

function stopAll(site) {
  const approved = site.studies.filter((one) => one.decisions.at(-1)?.decision === "approve");
  if (!approved.length) return "";
  const stop = () => confirm(`Stop all ${approved.length} approved studies? Nothing more leaves this site for them.`) &&
    attempt(() => post("/api/site/stop-all", { why: "all studies were stopped" }), "All studies are stopped.").then(() => refresh());
  return make("p", {}, make("button", { type: "button", class: "stop", onclick: stop, "data-key": "stop all" }, `Stop all studies (${approved.length})`));
}

function budgets(rows) {
  return table("budgets", "Used over all runs of this site", [
    ["Budget", (one) => one.what],
    ["Used", (one) => (one.what === "bytes" ? bytes(one.used) : one.used === null ? "cannot be counted" : number(one.used)), "number"],
    ["Limit", (one) => (one.most === null ? "none" : one.what === "bytes" ? bytes(one.most) : number(one.most)), "number"],
    ["", (one) => (one.most === null ? "" : progressBar(one.used ?? one.most, one.most, one.sentence))],
    ["Setting in local/policy.toml", (one) => one.setting]], rows);
}

// --- the ledger ---------------------------------------------------------------------------------

function searchForm(site) {
  const runs = [...site.studies, ...site.others].filter((one) => one.left.length).map((one) => one.run);
  const kinds = [...new Set([...site.studies, ...site.others].flatMap((one) => one.left.map((row) => row.kind)))].sort();
  const field = (name, words, element) => {
    element.id = `search-${name}`;
    element.dataset.key = `search ${name}`;
    element.value = search[name];
    element.addEventListener("input", () => { search[name] = element.value; });
    element.addEventListener("keydown", (event) => event.key === "Enter" && go());
    return [make("label", { for: element.id }, words), element];
  };
  const choice = (values, all) => make("select", {}, make("option", { value: "" }, all), values.map((one) => make("option", { value: one }, one)));
  const go = async () => {
    found = await attempt(() => get("/api/site/ledger", search)) || found;
    document.getElementById("lines").replaceChildren(lines());
  };
  return make("p", { class: "row" }, field("text", "Text", make("input", { type: "search", size: 24, maxlength: 1000 })),
    field("kind", "Kind", choice(kinds, "all kinds")), field("run", "Run", choice(runs, "all runs")),
    make("button", { type: "button", onclick: go, "data-key": "search" }, "Search"));
}

function lines() {
  if (!found) return make("p", { class: "quiet" }, "Search for an operation, a receiver or a digest, or leave the text empty to see all lines.");
  const words = `${found.found} of ${found.of} lines, ${bytes(found.bytes)}${found.found > found.lines.length ? `; the last ${found.lines.length} are shown` : ""}`;
  return table("lines", words, [["Run", (line) => line.run], ["Line", (line) => String(line.index + 1), "number"], ["Round", (line) => String(line.round), "number"],
    ["Operation", (line) => line.operation], ["Kind", (line) => line.kind], ["Bytes", (line) => bytes(line.bytes), "number"], ["To", (line) => line.to],
    ["Epsilon so far", (line) => number(line.privacy?.epsilon), "number"], ["Digest", (line) => line.digest.slice(0, 16)]], found.lines, "No line holds this.");
}

takeToken();
const turn = poll(() => refresh(false), 5);
window.addEventListener("hashchange", () => { takeToken(); say(""); turn(); });
turn();
