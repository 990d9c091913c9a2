// Line charts as SVG, drawn here: no library, no inline style. Dashes and marks tell lines apart without colours.

import { make, number, table } from "/shared.js";

const SPACE = "http://www.w3.org/2000/svg";
const COLOURS = 8; // --c0 to --c7 of the style sheet
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [300, 78, 16, 34, 44];
export const narrow = matchMedia("(max-width: 40rem)");
let WIDTH = 640; // of the drawing; less on a narrow screen, so that its words stay legible

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) || rough;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function range(values) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.05 || 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
  return [low, high];
}

/** `lines`: [{name, points: [[x, y], ...]}]; points without a number are left out. */
export function lineChart({ key, title, xLabel, yLabel, lines, format = number, whole = true, zero = false }) {
  const shown = lines
    .map((line) => ({ ...line, points: line.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)) }))
    .filter((line) => line.points.length);
  if (!shown.length) return null;
  WIDTH = narrow.matches ? 400 : 640;
  const every = shown.flatMap((line) => line.points);
  let [x0, x1] = range(every.map(([x]) => x));
  const [y0, y1] = range([...every.map(([, y]) => y), ...(zero ? [0] : [])]);
  if (whole && every.every(([x]) => x === every[0][0])) [x0, x1] = [every[0][0] - 1, every[0][0] + 1];
  const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const up = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}. The table below has its values.` });
  svg.append(draw("title", {}, title), draw("text", { x: LEFT, y: 18, class: "name" }, title));
  axes(svg, [x0, x1], [y0, y1], across, up, { xLabel, yLabel, format, whole });
  shown.forEach((line, place) => drawLine(svg, line, place, across, up, format));
  const legend = shown.length > 1 ? make("ul", { class: "legend" }, shown.map((line, place) => legendItem(line, place))) : null;
  return make("figure", { class: "chart", "data-chart": key }, svg, legend, behind(key, title, xLabel, yLabel, shown));
}

function axes(svg, [x0, x1], [y0, y1], across, up, { xLabel, yLabel, format, whole }) {
  for (const y of ticks(y0, y1, 5)) {
    svg.append(draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: up(y), y2: up(y), class: "grid" }),
      draw("text", { x: LEFT - 6, y: up(y) + 4, class: "tick end" }, format(y)));
  }
  for (const x of ticks(x0, x1, narrow.matches ? 5 : 8).filter((one) => !whole || Number.isInteger(one))) {
    svg.append(draw("text", { x: across(x), y: HEIGHT - BOTTOM + 16, class: "tick middle" }, String(x)));
  }
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  svg.append(draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }),
    draw("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, class: "tick middle" }, xLabel),
    draw("text", { x: 14, y: middle, class: "tick middle", transform: `rotate(-90 14 ${middle})` }, yLabel));
}

function drawLine(svg, line, place, across, up, format) {
  const colour = colourOf(place);
  const path = line.points.map(([x, y], at) => `${at ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
  const look = { fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dashes(place) };
  const group = draw("g", { class: "line" }, draw("path", { d: path, ...look }));
  if (line.points.length <= 60) {
    for (const [x, y] of line.points) {
      const words = `${line.name}: ${format(y)} at ${x}`;
      group.append(draw("circle", { cx: across(x), cy: up(y), r: 3, fill: colour }, draw("title", {}, words)));
    }
  }
  svg.append(group);
}

const colourOf = (place) => getComputedStyle(document.documentElement).getPropertyValue(`--c${place % COLOURS}`).trim();
const dashes = (place) => DASHES[Math.floor(place / COLOURS + place) % DASHES.length];

function legendItem(line, place) {
  const sample = draw("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" },
    draw("line", { x1: 0, x2: 30, y1: 5, y2: 5, stroke: colourOf(place), "stroke-width": 2.5,
      "stroke-dasharray": dashes(place) }));
  return make("li", {}, sample, " ", line.name);
}

/** The values of a chart as a table. */
function behind(key, title, xLabel, yLabel, lines) {
  const places = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const values = lines.map((line) => new Map(line.points));
  const rows = places.map((x) => [x, ...values.map((one) => one.get(x))]);
  const names = [xLabel, ...lines.map((line) => line.name)];
  return make("details", { "data-key": `behind ${key}` }, make("summary", {}, "Values"),
    table(`values ${key}`, `${title} (${yLabel})`, names.map((name, at) => [name, (row) => number(row[at]), "number"]), rows.slice(-200)));
}
