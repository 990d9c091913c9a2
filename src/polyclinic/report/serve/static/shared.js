// What both pages use: questions to the server, elements, numbers. Texts become text nodes only, never HTML.

const STORED = "polyclinic-token";

export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    localStorage.setItem(STORED, given);
    history.replaceState(null, "", location.pathname);
  }
}

async function ask(path, options = {}) {
  const headers = { authorization: `Bearer ${localStorage.getItem(STORED) || ""}`, ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer. Was it ended in its terminal?");
  }
  const content = await answer.json().catch(() => ({ error: `The server answered with status ${answer.status}.` }));
  if (answer.status === 401) askForToken();
  if (!answer.ok) throw new Error(content.error || `status ${answer.status}`);
  return content;
}

export const get = (path, query = {}) => {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const text = new URLSearchParams(pairs).toString();
  return ask(text ? `${path}?${text}` : path);
};

export const post = (path, content) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(content) });

function askForToken() {
  if (document.getElementById("token")) return;
  const field = make("input", { id: "token", type: "password", autocomplete: "off", size: 48 });
  const use = () => {
    localStorage.setItem(STORED, field.value.trim().replace(/^.*#token=/, ""));
    location.reload();
  };
  const button = make("button", { type: "button", onclick: use }, "Use it");
  field.addEventListener("keydown", (event) => event.key === "Enter" && use());
  const words = "Open the address that polyclinic serve printed, or paste its token here:";
  show(make("section", {}, make("h2", {}, "A token is needed"), make("p", {}, make("label", { for: "token" }, words)),
    make("p", {}, field, " ", button)));
}

// --- elements -----------------------------------------------------------------------------------

const ATTRIBUTES = new Set(["for", "colspan", "scope", "role", "open", "list", "tabindex", "href", "target",
  "rel", "src", "alt", "loading", "type", "min", "max", "value", "name", "size", "maxlength", "autocomplete"]);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Show new content; the focus stays on what has the same data-key, and open details stay open. */
export function show(...content) {
  const main = document.getElementById("main");
  const focused = document.activeElement?.dataset?.key;
  const open = new Set([...main.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key));
  const scrolled = [...main.querySelectorAll(".wide[data-key]")].map((one) => [one.dataset.key, one.scrollLeft]);
  main.replaceChildren(...content);
  for (const one of main.querySelectorAll("details[data-key]")) if (open.has(one.dataset.key)) one.open = true;
  for (const [key, left] of scrolled) for (const one of keyed(main, key)) one.scrollLeft = left;
  if (focused) for (const one of keyed(main, focused)) one.focus({ preventScroll: true });
}

const keyed = (main, key) => [...main.querySelectorAll("[data-key]")].filter((one) => one.dataset.key === key);

export function say(words, bad = false) {
  const message = document.getElementById("message");
  message.hidden = !words;
  message.className = bad ? "bad" : "";
  message.textContent = words;
}

/** Do something that may fail, and say so; without words for success, only an old complaint goes away. */
export async function attempt(work, done) {
  try {
    const found = await work();
    if (done) say(done);
    else if (document.getElementById("message").className === "bad") say("");
    return found;
  } catch (error) {
    say(error.message, true);
    return null;
  }
}

/** A table: `columns` are [title, how to show a row, "number" or ""]. */
export function table(key, caption, columns, rows, empty = "Nothing yet.") {
  if (!rows.length) return make("p", { class: "quiet" }, empty);
  const head = make("tr", {}, columns.map(([title, , kind]) => make("th", { scope: "col", class: kind || "" }, title)));
  const line = (row) => make("tr", {}, columns.map(([, cell, kind]) => make("td", { class: kind || "" }, cell(row) ?? "")));
  const whole = make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, rows.map(line)));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption, "data-key": `table ${key}` }, whole);
}

export function progressBar(done, all, words) {
  const share = all ? Math.min(1, done / all) : 0;
  return make("progress", { max: 1, value: share, title: words, "aria-label": words });
}

// --- numbers and words --------------------------------------------------------------------------

export function bytes(count) {
  if (typeof count !== "number") return "";
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function number(value) {
  if (typeof value !== "number") return "";
  if (value !== 0 && (Math.abs(value) >= 10000 || Math.abs(value) < 0.001)) return value.toExponential(2);
  return Number.isInteger(value) ? String(value) : value.toFixed(Math.abs(value) < 10 ? 3 : 1);
}

export const count = (many, thing) => `${many} ${thing}${many === 1 ? "" : "s"}`;

export const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");

/** Ask again every so many seconds, not while the page is hidden, and never twice at once. */
export function poll(work, seconds) {
  let timer = null;
  const turn = async () => {
    clearTimeout(timer);
    if (!document.hidden) await work();
    timer = setTimeout(turn, seconds * 1000);
  };
  document.addEventListener("visibilitychange", () => !document.hidden && turn());
  return turn;
}
