// The map of the start page: what each of eight devices holds under each strategy, and what it sends to whom.

import { COLOURS, element } from "./draw.js";

export const DEVICES = 8;
const upTo = (count) => Array.from({ length: count }, (_, k) => k);
const ALL = upTo(DEVICES);
const part = (device) => [device];
const whole8 = () => ALL;
const quarter = (device) => ALL.slice(2 * (device % 4), 2 * (device % 4) + 2);
const halfBy = (bit) => (device) => ALL.slice(4 * ((device >> bit) & 1), 4 * ((device >> bit) & 1) + 4);

// For each strategy the parts of 8 that a device holds: samples and tokens of the batch, layers and columns of the
// model, and parts of the optimizer's state. `columns` and `state` of ep are those of the experts: attention, and its
// optimizer state, is whole on every device.
// links: ring (to the next device, and from the last to the first), line (there and back), all, or cube.
export const STRATEGIES = {
  "one device": {
    title: "One device holds everything", cuts: "nothing", sends: "nothing", chapter: "02_gpt", links: "none",
    holds: { samples: whole8, tokens: whole8, layers: whole8, columns: whole8, state: whole8 }, only: 1,
  },
  dp: {
    title: "Data parallelism", cuts: "the batch: each device has a copy of the model and some of the samples",
    sends: "gradients, summed over all devices once a step", chapter: "04_data_parallel", links: "ring",
    holds: { samples: part, tokens: whole8, layers: whole8, columns: whole8, state: whole8 },
  },
  ZeRO: {
    title: "ZeRO stage 3, or FSDP", cuts: "the batch, and all that the devices would hold as copies",
    sends: "parameters, gathered just before each layer uses them, and gradients, each to its owner",
    chapter: "05_zero", links: "ring",
    holds: { samples: part, tokens: whole8, layers: whole8, columns: part, state: part },
  },
  tp: {
    title: "Tensor parallelism", cuts: "every layer: each device has some columns of each matrix",
    sends: "activations, summed in every layer, forward and backward", chapter: "06_tensor_parallel", links: "ring",
    holds: { samples: whole8, tokens: whole8, layers: whole8, columns: part, state: part },
  },
  pp: {
    title: "Pipeline parallelism", cuts: "the stack of layers: each device has some of them",
    sends: "activations to the next device and their gradients back, for every microbatch", chapter: "07_pipeline",
    links: "line", holds: { samples: whole8, tokens: whole8, layers: part, columns: whole8, state: part },
  },
  cp: {
    title: "Context parallelism", cuts: "every sequence: each device has some of its tokens",
    sends: "keys and values, around a ring in every layer", chapter: "11_long_sequences", links: "ring",
    holds: { samples: whole8, tokens: part, layers: whole8, columns: whole8, state: whole8 },
  },
  ep: {
    title: "Expert parallelism", cuts: "the batch and the experts: each device has some experts of each layer",
    sends: "tokens to their experts and results back, in every layer", chapter: "12_experts", links: "all",
    holds: { samples: part, tokens: whole8, layers: whole8, columns: part, state: part },
  },
  "dp x tp x pp": {
    title: "All at once: 2 x 2 x 2", cuts: "the batch, every layer and the stack of layers, each in two",
    sends: "all three: sums in layers, activations between stages, gradients between copies",
    chapter: "09_3d_parallel", links: "cube",
    holds: { samples: halfBy(2), tokens: whole8, layers: halfBy(1), columns: halfBy(0), state: quarter },
  },
};

// The pairs of devices that send to each other.
export function pairs(links) {
  if (links === "ring") return ALL.map((device) => [device, (device + 1) % DEVICES]);
  if (links === "line") return upTo(DEVICES - 1).map((device) => [device, device + 1]);
  if (links === "all") return ALL.flatMap((device) => upTo(device).map((other) => [other, device]));
  if (links === "cube") return [1, 2, 4].flatMap((bit) => ALL.filter((d) => !(d & bit)).map((d) => [d, d | bit]));
  return [];
}

// ---- the picture ----------------------------------------------------------------------------------------------------

const BOX = { width: 132, height: 128 };
const GAP = 34;
const CELL = 6.5;
const COLOUR = { batch: COLOURS.I, model: COLOURS.parameters, state: COLOURS.optimizer };

// Return where a device stands. Devices go around the edge, so that neighbours in a ring stand side by side, and so do
// the last and the first. The grid has two columns or two rows, so all of it is edge.
export function cellOf(device, columns) {
  const rows = DEVICES / columns;
  const right = columns - 1; // the last device of the first row
  const bottom = right + rows - 1; // the last one that goes down
  if (device <= right) return { column: device, row: 0 };
  if (device <= bottom) return { column: right, row: device - right };
  if (device <= bottom + right) return { column: right - (device - bottom), row: rows - 1 };
  return { column: 0, row: DEVICES - device };
}

// Return where a device of the cube stands. Devices that differ in one bit stand side by side, but for two pairs, which
// stand at the ends of a row or a column.
export function cubeCellOf(device, columns) {
  const across = device % 2;
  const along = [0, 1, 3, 2][Math.floor(device / 2)];
  return columns === 2 ? { column: across, row: along } : { column: along, row: across };
}

function place(device, columns, isCube) {
  const { column, row } = (isCube ? cubeCellOf : cellOf)(device, columns);
  return { x: GAP + column * (BOX.width + GAP), y: GAP + row * (BOX.height + GAP) };
}

function grid(x, y, rows, columns, isHeld, colour) {
  const cells = [];
  for (const row of upTo(rows)) {
    for (const column of upTo(columns)) {
      const held = isHeld(row, column);
      const look = held ? { fill: colour, stroke: "currentColor", "stroke-width": 0.5 }
        : { fill: "none", stroke: "currentColor", "stroke-width": 0.4, class: "grid" };
      cells.push(element("svg:rect", { x: x + column * CELL, y: y + row * CELL, width: CELL, height: CELL, ...look }));
    }
  }
  return cells;
}

const caption = (x, y, words, size = 10) =>
  element("svg:text", { x, y, "font-size": size, fill: "currentColor" }, words);

function drawDevice({ holds, links, only = DEVICES }, isExperts, device, columns) {
  const { x, y } = place(device, columns, links === "cube");
  const group = element("svg:g", { class: device < only ? "" : "idle" });
  group.append(element("svg:rect", { x, y, width: BOX.width, height: BOX.height, rx: 6, class: "device" }));
  group.append(caption(x + 7, y + 14, `device ${device}`, 11));
  if (device >= only) return group;
  const held = Object.fromEntries(Object.entries(holds).map(([kind, parts]) => [kind, parts(device)]));
  const isAttention = (row) => isExperts && row % 2 === 0; // every second row of layers, and of their state
  const left = x + 8;
  const right = x + 72;
  group.append(
    caption(left, y + 30, "batch"), caption(right, y + 30, "layers"),
    ...grid(left, y + 35, 8, 8, (r, c) => held.samples.includes(r) && held.tokens.includes(c), COLOUR.batch),
    ...grid(right, y + 35, 8, 8, (r, c) => held.layers.includes(r) && (isAttention(r)
      || held.columns.includes(c)), COLOUR.model),
    caption(left, y + 100, "optimizer state"),
    ...grid(left, y + 105, 2, 16, (r, c) => isAttention(r) || held.state.includes(Math.floor(c / 2)), COLOUR.state),
  );
  return group;
}

function drawLink([from, to], columns, links) {
  const [a, b] = [from, to].map((device) => place(device, columns, links === "cube")).map(({ x, y }) =>
    ({ x: x + BOX.width / 2, y: y + BOX.height / 2 }));
  const [dx, dy] = [b.x - a.x, b.y - a.y];
  if (links === "cube") {
    const isFirstRow = a.y < BOX.height + GAP;
    const isFirstColumn = a.x < BOX.width + GAP;
    if (Math.abs(dx) > 2 * BOX.width) return drawAround(a, b, { x: 0, y: isFirstRow ? -1 : 1 });
    if (Math.abs(dy) > 2 * BOX.height) return drawAround(a, b, { x: isFirstColumn ? -1 : 1, y: 0 });
  }
  const isBoth = links !== "ring";
  const sizes = [[dx, BOX.width], [dy, BOX.height]];
  const share = Math.min(...sizes.map(([way, size]) => (way ? size / 2 / Math.abs(way) : 1)));
  const ends = { x1: a.x + dx * share, y1: a.y + dy * share, x2: b.x - dx * share, y2: b.y - dy * share };
  const marks = { "marker-end": "url(#map-arrow)", ...(isBoth ? { "marker-start": "url(#map-arrow)" } : {}) };
  return element("svg:line", { ...ends, class: "link", ...marks });
}

// Draw a link between the ends of a row or a column, along the margin that lies in this direction.
function drawAround(a, b, direction) {
  const shifted = (end, far) =>
    `${end.x + direction.x * (BOX.width / 2 + far)},${end.y + direction.y * (BOX.height / 2 + far)}`;
  const points = [shifted(a, 0), shifted(a, GAP / 2), shifted(b, GAP / 2), shifted(b, 0)];
  const marks = { "marker-start": "url(#map-arrow)", "marker-end": "url(#map-arrow)" };
  return element("svg:polyline", { points: points.join(" "), class: "link", fill: "none", ...marks });
}

function drawMap(name, columns) {
  const strategy = STRATEGIES[name];
  const rows = DEVICES / columns;
  const [width, height] = [GAP + columns * (BOX.width + GAP), GAP + rows * (BOX.height + GAP)];
  const words = `${strategy.title}. Each device holds: cut ${strategy.cuts}. It sends ${strategy.sends}.`;
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, class: "map" });
  const arrow = element("svg:marker", { id: "map-arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 6,
    markerHeight: 6, orient: "auto-start-reverse" },
  element("svg:path", { d: "M 0 0 L 10 5 L 0 10 z", class: "arrow" }));
  svg.append(element("svg:defs", {}, arrow));
  for (const pair of pairs(strategy.links)) svg.append(drawLink(pair, columns, strategy.links));
  for (const device of ALL) svg.append(drawDevice(strategy, name === "ep", device, columns));
  return svg;
}

function openMap(root) {
  const buttons = element("div", { class: "map-buttons", role: "group", "aria-label": "strategies" });
  const picture = element("div");
  const words = element("div", { class: "map-words", "aria-live": "polite" });
  let chosen = "dp";
  const show = (name) => {
    const { title, cuts, sends, chapter } = STRATEGIES[name];
    picture.replaceChildren(drawMap(name, root.clientWidth < 560 ? 2 : 4));
    const link = element("a", { href: `../../chapters/${chapter}.html` }, "its chapter");
    words.replaceChildren(element("p", {}, element("strong", {}, title), ". It cuts ", cuts, ". It sends ", sends, ". ",
      "Read ", link, "."));
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.textContent === name));
  };
  for (const name of Object.keys(STRATEGIES)) {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("mouseenter", () => show(name));
    button.addEventListener("click", () => {
      chosen = name;
      show(name);
    });
    buttons.append(button);
  }
  buttons.addEventListener("mouseleave", () => show(chosen));
  window.addEventListener("resize", () => show(chosen));
  root.replaceChildren(buttons, picture, words);
  show(chosen);
}

if (typeof document !== "undefined" && document.getElementById("map")) openMap(document.getElementById("map"));
