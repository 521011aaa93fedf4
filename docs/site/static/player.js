// A collective that one can step through: the ranks on a ring, what each holds, and the messages of every round. The
// runs are recorded (docs/site/collectives.py); RUNS is in the script before this one.

import { element } from "./draw.js";

const SIZE = 560;
const MIDDLE = SIZE / 2;
const RADIUS = 195;
const CELL = { width: 22, height: 30 };
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
  const width = CELL.width / ranks;
  for (const rank of held) {
    parts.push(element("svg:rect", { x: x + rank * width, y, width, height: CELL.height, fill: TINTS[rank],
      stroke: "currentColor", "stroke-width": 0.5, "pointer-events": "none" }));
  }
  return parts;
}

function rankBox(rank, ranks, slots, slotName) {
  const { x, y } = spot(rank, ranks);
  const columns = Math.min(4, ranks);
  const rows = Math.ceil(ranks / columns);
  const [left, top] = [x - (columns * CELL.width) / 2, y - (rows * CELL.height) / 2];
  const group = element("svg:g", {});
  const width = Math.max(columns * CELL.width + 8, 66); // the rank's name has room
  group.append(element("svg:rect", { x: left - 4, y: top - 18, width, height: rows * CELL.height + 22, rx: 4,
    class: "device" }));
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

// An arrow from rank to rank, and on it the stripes that it carries.
function arrow([source, dest, cells], ranks) {
  const [a, b] = [spot(source, ranks, RADIUS * 0.62), spot(dest, ranks, RADIUS * 0.62)];
  const [dx, dy] = [b.x - a.x, b.y - a.y];
  const long = Math.hypot(dx, dy) || 1;
  const shift = { x: (-dy / long) * 7, y: (dx / long) * 7 }; // there and back do not lie upon one another
  const ends = { x1: a.x + shift.x, y1: a.y + shift.y, x2: b.x + shift.x, y2: b.y + shift.y };
  const carried = [...new Set(cells.map(([, contributions]) => contributions))];
  const group = element("svg:g", {});
  group.append(element("svg:line", { ...ends, class: "link", "marker-end": "url(#player-arrow)" }));
  const held = bitsOf(carried[0], ranks);
  const [x, y] = [(ends.x1 * 2 + ends.x2) / 3 - 4 * held.length, (ends.y1 * 2 + ends.y2) / 3 - 7];
  held.forEach((rank, place) => group.append(element("svg:rect", { x: x + 8 * place, y, width: 8, height: 14,
    fill: TINTS[rank], stroke: "currentColor", "stroke-width": 0.7 })));
  return group;
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
  for (const message of run.rounds[round] ?? []) svg.append(arrow(message, ranks));
  run.states[round].forEach((slots, rank) => svg.append(rankBox(rank, ranks, slots, slotName)));
  return svg;
}

function wordsOf(name, run, ranks, round) {
  const sent = chunksSent(run, round);
  const most = Math.max(...sent);
  const unit = name === "attention" ? "blocks" : "chunks of n/p bytes";
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
