// A collective that one can step through: the ranks on a ring, what each holds, and the messages of every round. The
// runs are recorded (docs/site/collectives.py); RUNS is in the script before this one.

import { element } from "./draw.js";

const SIZE = 560;
const MIDDLE = SIZE / 2;
const RADIUS = 222;
const CELL = { width: 22, height: 30 };
const INWARD = 10; // how much nearer to the middle of the ring arrows run
const LABEL_AT = 32; // how far from its tail a long arrow has its label
const MILLISECONDS = 1400; // of a round while it plays
const TINTS = ["#0072B2", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#8A6FB0"];

// What is shown: its title, what a slot is, and what the algorithm sends, with n the bytes of the array on p ranks.
const SHOWN = {
  ring: ["ring all-reduce", "chunk", "2 n (p-1)/p bytes from each rank, in 2 (p-1) rounds"],
  scatter: ["ring reduce-scatter", "chunk", "n (p-1)/p bytes from each rank; rank r keeps chunk r"],
  doubling: ["recursive doubling", "chunk", "n lg p bytes from each rank, in only lg p rounds"],
  halving: ["halving, then doubling", "chunk", "2 n (p-1)/p bytes from each rank, in 2 lg p rounds"],
  hierarchical: ["hierarchical all-reduce on two hosts", "chunk", "between the hosts only 2 n/p bytes from each rank"],
  exchange: ["all-to-all", "from rank", "n (p-1)/p bytes from each rank, each to another rank"],
  gather: ["ZeRO stage 3: gather, use, free", "shard", "n (p-1)/p bytes from each rank, for each use of a unit"],
  attention: ["ring attention", "keys of rank", "the keys and values of a rank, p-1 times: queries stay"],
};

const bitsOf = (contributions, ranks) =>
  Array.from({ length: ranks }, (_, rank) => rank).filter((rank) => (contributions >> rank) & 1);

const spot = (rank, ranks, radius = RADIUS) => {
  const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
  return { x: MIDDLE + radius * Math.cos(angle), y: MIDDLE + radius * Math.sin(angle) };
};

// One slot: an empty box, or stripes of the ranks whose contributions it holds.
function slotBox(x, y, contributions, ranks, words) {
  const held = bitsOf(contributions, ranks);
  const parts = [element("svg:rect", { x, y, ...CELL, class: "slot" }, element("svg:title", {}, words))];
  return [...parts, ...stripes(x, y, CELL.height, held, ranks)];
}

// A stripe for each of these ranks, inside the border of a slot. Its own edge is too thin to darken its colour.
function stripes(x, y, height, held, ranks) {
  const border = 0.4;
  const width = (CELL.width - 2 * border) / ranks;
  return held.map((rank) => element("svg:rect", { x: x + border + rank * width, y: y + border, width,
    height: height - 2 * border, fill: TINTS[rank], stroke: "currentColor", "stroke-width": 0.15,
    "pointer-events": "none" }));
}

// The box of a rank: its name, and below it rows of up to four slots.
function areaOf(rank, ranks) {
  const { x, y } = spot(rank, ranks);
  const columns = Math.min(4, ranks);
  const rows = Math.ceil(ranks / columns);
  const [left, top] = [x - (columns * CELL.width) / 2, y - (rows * CELL.height) / 2]; // of the slots
  const width = Math.max(columns * CELL.width + 8, 66); // the rank's name has room
  return { left, top, columns, box: { x: left - 4, y: top - 18, width, height: rows * CELL.height + 22 } };
}

function rankBox(rank, ranks, slots, slotName) {
  const { left, top, columns, box } = areaOf(rank, ranks);
  const group = element("svg:g", {});
  group.append(element("svg:rect", { ...box, rx: 4, class: "device" }));
  group.append(element("svg:rect", { x: left - 1, y: top - 14, width: 9, height: 9, fill: TINTS[rank],
    stroke: "currentColor", "stroke-width": 0.7 }));
  const place = { x: left + 12, y: top - 5, "font-size": 12, fill: "currentColor" };
  group.append(element("svg:text", place, `rank ${rank}`));
  slots.forEach((contributions, slot) => {
    const [column, row] = [slot % columns, Math.floor(slot / columns)];
    const held = bitsOf(contributions, ranks);
    const words = `${slotName} ${slot}: ${held.length ? held.join(" + ") : "nothing"}`;
    group.append(...slotBox(left + column * CELL.width, top + row * CELL.height, contributions, ranks, words));
  });
  return group;
}

// How far one goes from a point inside a box in a direction until one leaves it.
function wayOut({ x, y }, box, way) {
  const along = (at, low, size, share) => (share ? ((share > 0 ? low + size : low) - at) / share : Infinity);
  return Math.min(along(x, box.x, box.width, way.x), along(y, box.y, box.height, way.y));
}

// Where an arrow between two ranks begins and ends: at their boxes. It runs on the right of the line between their
// middles, so that there and back do not lie upon one another, and nearer to the middle of the ring than the boxes
// that it passes.
function courseOf(source, dest, ranks) {
  const [from, to] = [source, dest].map((rank) => areaOf(rank, ranks).box);
  const [a, b] = [from, to].map((box) => ({ x: box.x + box.width / 2, y: box.y + box.height / 2 }));
  const long = Math.hypot(b.x - a.x, b.y - a.y);
  const way = { x: (b.x - a.x) / long, y: (b.y - a.y) / long };
  const inward = { x: MIDDLE - (a.x + b.x) / 2, y: MIDDLE - (a.y + b.y) / 2 };
  const share = Math.min(1, INWARD / (Math.hypot(inward.x, inward.y) || 1));
  const shifted = ({ x, y }) => ({ x: x - 7 * way.y + share * inward.x, y: y + 7 * way.x + share * inward.y });
  const [start, end] = [shifted(a), shifted(b)];
  const [first, last] = [wayOut(start, from, way) + 2, wayOut(end, to, { x: -way.x, y: -way.y }) + 3];
  return { tail: { x: start.x + way.x * first, y: start.y + way.y * first },
    head: { x: end.x - way.x * last, y: end.y - way.y * last }, way };
}

// The numbers of slots in words, such as "3" or "0-3".
function slotsText(slots) {
  const sorted = [...slots].sort((a, b) => a - b);
  const [first, last] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length === 1) return `${first}`;
  return last - first === sorted.length - 1 ? `${first}-${last}` : sorted.join(", ");
}

// An arrow from rank to rank, and beside it a label: the numbers of the slots that it carries, and their stripes.
function arrow([source, dest, cells], ranks) {
  const { tail, head, way } = courseOf(source, dest, ranks);
  const line = element("svg:line", { x1: tail.x, y1: tail.y, x2: head.x, y2: head.y, class: "link",
    "marker-end": "url(#player-arrow)" });
  const number = slotsText(cells.map(([slot]) => slot));
  const words = 7.5 * number.length;
  const size = { width: words + CELL.width + 10, height: 20 };
  const far = Math.min(Math.hypot(head.x - tail.x, head.y - tail.y) / 2, LABEL_AT);
  const beside = (Math.abs(way.y) * size.width + Math.abs(way.x) * size.height) / 2 + 3;
  const x = tail.x + way.x * far - way.y * beside - size.width / 2;
  const y = tail.y + way.y * far + way.x * beside - size.height / 2;
  const [left, top, height] = [x + words + 7, y + 3, size.height - 6];
  const label = element("svg:g", {}, element("svg:rect", { x, y, ...size, rx: 4, class: "message" }),
    element("svg:text", { x: x + 4, y: y + 14.5, "font-size": 13, class: "numbers" }, number),
    element("svg:rect", { x: left, y: top, width: CELL.width, height, class: "slot" }),
    ...stripes(left, top, height, bitsOf(cells[0][1], ranks), ranks));
  return { line, label };
}

// The chunks that a rank has sent before a round, and the largest of the ranks' numbers.
export function chunksSent(run, round) {
  const counts = run.states[0].map(() => 0);
  for (const messages of run.rounds.slice(0, round)) {
    for (const [source, , cells] of messages) counts[source] += cells.length;
  }
  return counts;
}

function drawRun(run, ranks, round, [title, slotName]) {
  const svg = element("svg:svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", class: "map player-picture",
    "aria-label": `${title} on ${ranks} ranks before round ${round + 1}` });
  const head = element("svg:marker", { id: "player-arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 6,
    markerHeight: 6, orient: "auto" }, element("svg:path", { d: "M 0 0 L 10 5 L 0 10 z", class: "arrow" }));
  svg.append(element("svg:defs", {}, head));
  const arrows = (run.rounds[round] ?? []).map((message) => arrow(message, ranks));
  svg.append(...arrows.map(({ line }) => line));
  run.states[round].forEach((slots, rank) => svg.append(rankBox(rank, ranks, slots, slotName)));
  svg.append(...arrows.map(({ label }) => label));
  return svg;
}

function wordsOf(name, run, ranks, round) {
  const sent = chunksSent(run, round);
  const most = Math.max(...sent);
  const plural = most === 1 ? "" : "s";
  const unit = name === "attention" ? `block${plural}` : `chunk${plural} of n/p bytes`;
  const last = run.rounds.length;
  const where = round < last ? `Round ${round + 1} of ${last}: the arrows are its messages.` : "Finished.";
  const isWhole = name === "gather" && round === last - 1;
  const freed = isWhole ? " All shards are here: the unit computes, then frees them." : "";
  return `${where}${freed} So far a rank has sent at most ${most} ${unit}; all ranks ${sent.reduce((a, b) => a + b)}.`;
}

function openPlayer(place) {
  let round = 0;
  let timer;
  const names = element("select", { name: "collective" },
    ...Object.keys(RUNS).map((name) => element("option", { value: name }, SHOWN[name][0])));
  const sizes = element("select", { name: "ranks" });
  const button = (words, act) => {
    const made = element("button", { type: "button" }, words);
    made.addEventListener("click", act);
    return made;
  };
  const picture = element("div");
  const words = element("p", { class: "map-words", "aria-live": "polite" });
  const run = () => RUNS[names.value][sizes.value];
  const show = () => {
    const ranks = Number(sizes.value);
    picture.replaceChildren(drawRun(run(), ranks, round, SHOWN[names.value]));
    const formula = `It sends ${SHOWN[names.value][2]}.`;
    words.replaceChildren(wordsOf(names.value, run(), ranks, round), element("br"), formula);
  };
  const stop = () => {
    clearInterval(timer);
    timer = undefined;
    play.textContent = "play";
  };
  const go = (way) => {
    round = (round + way + run().rounds.length + 1) % (run().rounds.length + 1);
    show();
  };
  const play = button("play", () => {
    if (timer !== undefined) return stop();
    play.textContent = "stop";
    timer = setInterval(() => go(1), MILLISECONDS);
    return go(1);
  });
  const choose = () => {
    const wanted = sizes.value || "4";
    const possible = Object.keys(RUNS[names.value]);
    sizes.replaceChildren(...possible.map((size) => element("option", {}, size)));
    sizes.value = possible.includes(wanted) ? wanted : "4";
    stop();
    round = 0;
    show();
  };
  names.addEventListener("input", choose);
  sizes.addEventListener("input", choose);
  const step = (way) => () => {
    stop();
    go(way);
  };
  const label = (text, control) => element("label", {}, text, control);
  const controls = [label("collective ", names), label("ranks ", sizes), button("back", step(-1)),
    button("step", step(1)), play];
  place.replaceChildren(element("div", { class: "player-controls" }, ...controls), picture, words);
  choose();
}

if (typeof document !== "undefined") document.querySelectorAll(".player").forEach(openPlayer);
