// Small SVG pictures: a schedule's timeline, activations alive, stacked bars. Colours as in visualize/style.py.

import { actionText, halvesOf } from "./actions.js";

export const COLOURS = {
  F: "#0072B2", B: "#E69F00", I: "#CC79A7", W: "#9FDBCA",
  parameters: "#0072B2", gradients: "#E69F00", optimizer: "#009E73", activations: "#F0E442", buffers: "#3A3A3A",
  tp: "#d187b0", dp: "#882255", pp: "#bc5300", cp: "#001c15", ep: "#ede141",
};
const INK = "#222222";
const LINES = Array.from({ length: 6 }, (_, k) => `var(--line-${k})`); // explorers.css: light and dark
const KIND_NAMES = { F: "forward", B: "backward", I: "backward for the input", W: "backward for the weights" };
const WIDTH = 760;
const LEFT = 62; // room for the rank's name
const RIGHT = 12;

// Make an SVG or HTML element. A tag that begins with "svg:" is SVG.
export function element(tag, attributes = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const node = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const text = (x, y, content, attributes = {}) =>
  element("svg:text", { x, y, "font-size": 12, fill: "currentColor", ...attributes }, content);
const line = (x1, y1, x2, y2, attributes = {}) =>
  element("svg:line", { x1, y1, x2, y2, stroke: "currentColor", ...attributes });
const gridLine = (x1, y1, x2, y2) => line(x1, y1, x2, y2, { class: "grid" });
// A box has an edge that is seen on any background.
const box = (attributes, ...children) =>
  element("svg:rect", { stroke: "currentColor", "stroke-width": 0.7, ...attributes }, ...children);

// Mix a colour with white.
function lighter(colour, share) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `#${parts.map((part) => Math.round(part + (255 - part) * share).toString(16).padStart(2, "0")).join("")}`;
}

function picture(height, label) {
  const svg = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  svg.classList.add("explorer-picture");
  return svg;
}

// Round steps for an axis: 1, 2 or 5 times a power of ten, about `count` of them up to `most`.
function ticks(most, count) {
  const rough = most / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((candidate) => candidate >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, k) => Number((k * step).toPrecision(12)));
}

function timeAxis(svg, total, y, scale) {
  for (const tick of ticks(total, 12)) {
    svg.append(line(scale(tick), y, scale(tick), y + 4), text(scale(tick), y + 16, tick, { "text-anchor": "middle" }));
  }
  const middle = LEFT + (WIDTH - LEFT - RIGHT) / 2;
  svg.append(text(middle, y + 32, "time, in the unit of F, I and W", { "text-anchor": "middle" }));
}

const timeScale = (total) => (time) => LEFT + (time / (total || 1)) * (WIDTH - LEFT - RIGHT);

// A row for each rank and a box for each action: its letter and microbatch where they fit, else the microbatch alone.
// Boxes of a rank's second and later stages are lighter and have a bar. A pair has its F above and its B below.
export function timeline({ rows, total, marked = new Set() }) {
  const scale = timeScale(total);
  const row = Math.min(30, Math.max(14, 300 / rows.length));
  const svg = picture(rows.length * row + 40, "timeline of the schedule");
  rows.forEach((slots, rank) => {
    const y = rank * row;
    svg.append(text(LEFT - 8, y + row / 2 + 4, `rank ${rank}`, { "text-anchor": "end" }));
    for (const { action, start, end } of slots) {
      const halves = halvesOf(action);
      const height = (row - 2) / halves.length;
      halves.forEach((half, place) => {
        const area = { x: scale(start), y: y + 1 + place * height, width: scale(end) - scale(start), height };
        svg.append(...actionBox(half, { ...area, rank, start, end, later: half.stage >= rows.length,
          thick: marked.has(actionText(half)), label: halves.length === 1 }));
      });
    }
  });
  timeAxis(svg, total, rows.length * row + 2, scale);
  return svg;
}

function actionBox({ stage, kind, microbatch }, { x, y, width, height, rank, start, end, later, thick, label }) {
  const fill = later ? lighter(COLOURS[kind], 0.45) : COLOURS[kind];
  const name = `${KIND_NAMES[kind]} of microbatch ${microbatch}, stage ${stage}, rank ${rank}: ${start} to ${end}`;
  const inner = Math.max(0, width - 0.6);
  const edge = thick ? { "stroke-width": Math.max(1.2, Math.min(2.4, width / 5)) } : {};
  const parts = [box({ x, y, width: inner, height, fill, ...edge }, element("svg:title", {}, name))];
  if (later) parts.push(element("svg:rect", { x, y: y + height - 3, width: inner, height: 2.4, fill: INK }));
  const words = [`${kind}${microbatch}`, `${microbatch}`].find((each) => each.length * 7 + 3 <= width);
  if (words !== undefined && label) {
    const ink = kind === "F" && !later ? "white" : INK; // the other colours are light
    const place = { "text-anchor": "middle", fill: ink, "font-size": 11, "pointer-events": "none" };
    parts.push(text(x + width / 2, y + height / 2 + (later ? 3 : 4), words, place));
  }
  return parts;
}

// A line of steps for each rank. `stages`: how many activations make one of all the rank's layers.
export function activationsPlot({ live, total, stages }) {
  const [top, height] = [8, 120];
  const scale = timeScale(total);
  const svg = picture(top + height + 40, "activations alive over time");
  const most = Math.max(1, ...live.flat().map(([, count]) => count / stages));
  const level = (count) => top + height - (height * count) / stages / most;
  for (const tick of ticks(most, 4)) {
    const y = level(tick * stages);
    svg.append(gridLine(LEFT, y, WIDTH - RIGHT, y), text(LEFT - 8, y + 4, tick, { "text-anchor": "end" }));
  }
  live.forEach((steps, rank) => {
    let path = `M ${scale(0)} ${level(0)}`;
    for (const [time, count] of steps) path += ` H ${scale(time)} V ${level(count)}`;
    path += ` H ${scale(total)}`;
    const colour = LINES[rank % LINES.length];
    const dash = ["none", "6 3", "2 2"][Math.floor(rank / LINES.length) % 3];
    const drawn = { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash };
    svg.append(element("svg:path", drawn));
  });
  timeAxis(svg, total, top + height + 2, scale);
  return svg;
}

// Which colour is which rank, or which kind.
export function legend(entries) {
  const list = element("p", { class: "explorer-legend" });
  for (const [name, colour] of entries) {
    const swatch = element("span", { class: "explorer-swatch" });
    swatch.style.background = colour;
    list.append(element("span", {}, swatch, name));
  }
  return list;
}

export const rankLegend = (ranks) =>
  legend(Array.from({ length: ranks }, (_, r) =>
    [`rank ${r}${["", ", dashed", ", dotted"][Math.floor(r / LINES.length)]}`, LINES[r % LINES.length]]));
export const kindLegend = (kinds) => legend(kinds.map((kind) => [`${kind}: ${KIND_NAMES[kind]}`, COLOURS[kind]]));

// A horizontal bar for each {name, parts: {kind: amount}, mark}, below its name and its sum in words; `limit` draws a
// line across. Lengths are shares of the width, and letters keep their size, so that a phone shows all of it.
export function bars(entries, write, limit = 0) {
  const [row, title, high] = [48, 17, 24];
  const [start, across] = [0.2, 99.4]; // percent: the edges of boxes have room
  const bottom = entries.length * row;
  const svg = element("svg:svg", { width: "100%", height: bottom + (limit ? 16 : 0), role: "img", "aria-label": "bars",
    class: "explorer-picture bars" });
  const sums = entries.map(({ parts }) => Object.values(parts).reduce((sum, part) => sum + part, 0));
  const scale = across / Math.max(...sums, limit, 1e-300);
  const ofWidth = (amount) => `${amount}%`;
  entries.forEach(({ parts }, index) => {
    const y = index * row;
    let x = start;
    for (const [kind, part] of Object.entries(parts)) {
      const area = { x: ofWidth(x), y: y + title, width: ofWidth(part * scale), height: high, fill: COLOURS[kind] };
      svg.append(box(area, element("svg:title", {}, `${kind}: ${write(part)}`)));
      x += part * scale;
    }
  });
  if (limit) {
    const x = start + limit * scale;
    const anchor = x < 35 ? "start" : x > 65 ? "end" : "middle";
    svg.append(
      line(ofWidth(x), 0, ofWidth(x), bottom, { stroke: "#D55E00", "stroke-width": 2 }),
      text(ofWidth(x), bottom + 12, `memory of a device: ${write(limit)}`, { "text-anchor": anchor, "font-size": 14 }));
  }
  entries.forEach(({ name, mark }, index) => {
    const look = { "font-size": 14, "font-weight": mark ? "bold" : "normal", class: "bar-words" };
    svg.append(text(0, index * row + 12, `${name}: ${write(sums[index])}`, look));
  });
  return svg;
}

// A picture that scrolls sideways where the page is narrower, and a line that says so there.
export function scrolling(svg) {
  return element("div", { class: "explorer-wide" },
    element("p", { class: "explorer-hint" }, "The picture scrolls sideways."),
    element("div", { class: "scrolls", tabindex: 0 }, svg));
}
