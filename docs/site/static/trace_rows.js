// A trace drawn: a row for each rank's computation, and below it a lane of communication for each axis.

import { element } from "./draw.js";
import { COMPUTATION, actionOf, laneOf, rowsOf, stepsOf, tracksWithArrows, whatOf } from "./trace.js";
import { edgeOf, inkOn } from "./trace_colours.js";

export const LABELS = 84; // pixels for the names of ranks and lanes
export const MARGIN = 8; // pixels at the right
const SIZE = { compute: 20, lane: 12, gap: 9, axis: 36 };
const LEAST = 1; // pixels: a slice that took no time is seen too
const HATCHED_FROM = 3; // pixels of waiting
const ARROWS = 300; // more could not be followed

// The unit in which a time is written, and how many of it one second has.
export function unitOf(seconds) {
  if (seconds >= 2) return ["s", 1];
  return seconds >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
}

// Every row of the picture: {rank, track, y, height, slices}; and the picture's height.
export function layRows(trace) {
  const tracks = rowsOf(trace);
  const rows = [];
  let y = 2;
  for (const each of trace.ranks) {
    for (const track of tracks) {
      const height = track === COMPUTATION ? SIZE.compute : SIZE.lane;
      rows.push({ rank: each.rank, track, y, height: height - 1, slices: each.tracks.get(track) ?? [] });
      y += height;
    }
    y += SIZE.gap;
  }
  return { rows, height: y + SIZE.axis, bottom: y };
}

// From seconds of the trace to pixels; `origin` is the second at which the trace's part begins.
export function scaleOf({ from, span }, origin, width) {
  const plot = width - LABELS - MARGIN;
  const first = origin + from;
  return { first, last: first + span, right: LABELS + plot, x: (time) => LABELS + ((time - first) / span) * plot };
}

const words = (x, y, content, look) => element("svg:text", { x, y, fill: "currentColor", ...look }, content);
const rule = (x1, y1, x2, y2, look) => element("svg:line", { x1, y1, x2, y2, stroke: "currentColor", ...look });

const edges = new Map();
function edgeFor(colour) {
  if (!edges.has(colour)) edges.set(colour, edgeOf(colour));
  return edges.get(colour);
}

// What is written in a bar so many pixels wide: an action's letter and microbatch, its microbatch, or the slice's name.
function barWords(name, row, wide) {
  const action = actionOf(name);
  const choices = action ? [`${action.kind}${action.microbatch}`, `${action.microbatch}`] : [name];
  const letter = row.track === COMPUTATION ? 7 : 5.6;
  return choices.find((each) => each.length * letter + 4 <= wide);
}

// The bars of a row, with what is faint in front of them, and the words in them.
function drawBars(row, scale, colours, pattern) {
  const bars = [];
  const names = [];
  const waits = [];
  let reached = -Infinity;
  for (const slice of row.slices) {
    if (slice.end < scale.first || slice.start > scale.last) continue;
    const x = Math.max(scale.x(slice.start), LABELS);
    const end = Math.min(scale.x(slice.end), scale.right);
    const wide = Math.max(end - x, LEAST);
    if (wide === LEAST && x + wide <= reached + LEAST / 2) continue; // another bar is where it would be
    reached = Math.max(reached, x + wide);
    const fill = colours[whatOf(slice.name)];
    const area = { y: row.y, height: row.height };
    bars.push(element("svg:rect", { x, width: wide, ...area, fill, stroke: edgeFor(fill), "stroke-width": 0.6 }));
    const waited = Math.min(scale.x(slice.start + slice.wait), scale.right) - x;
    const isFaint = waited >= HATCHED_FROM;
    if (isFaint) waits.push(element("svg:rect", { x, width: waited, ...area, fill: `url(#${pattern})` }));
    const free = isFaint ? x + waited : x;
    const content = barWords(slice.name, row, end - free);
    if (content !== undefined) {
      const look = { "font-size": row.height > 15 ? 11 : 9.5, fill: inkOn(fill), "text-anchor": "middle" };
      names.push(words((free + end) / 2, row.y + row.height / 2 + (row.height > 15 ? 4 : 3.2), content, look));
    }
  }
  return { bars: [...bars, element("svg:g", { class: "idle" }, ...waits)], names };
}

function drawNames(rows) {
  const names = [];
  for (const { rank, track, y, height } of rows) {
    const middle = y + height / 2;
    if (track === COMPUTATION) names.push(words(2, middle + 4, `rank ${rank}`, { "font-size": 12 }));
    else names.push(words(LABELS - 6, middle + 3.4, laneOf(track), { "font-size": 10, "text-anchor": "end" }));
  }
  return names;
}

// A line of time below the rows, counted from the beginning of the part that is shown.
function drawAxis(scale, origin, bottom, unit, clock) {
  const [name, times] = unit;
  const [first, last] = [(scale.first - origin) * times, (scale.last - origin) * times];
  const rough = (last - first) / Math.max(2, (scale.right - LABELS) / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((candidate) => candidate >= rough) ?? 10 * power;
  const parts = [rule(LABELS, bottom, scale.right, bottom, {})];
  for (let k = Math.ceil(first / step - 1e-9); k * step <= last + step * 1e-9; k += 1) {
    const x = scale.x(origin + (k * step) / times);
    const value = Number((k * step).toPrecision(8)).toLocaleString("en-US", { maximumFractionDigits: 6 });
    parts.push(rule(x, bottom, x, bottom + 4, {}), words(x, bottom + 15, value, { "font-size": 11,
      "text-anchor": "middle" }));
  }
  const middle = (LABELS + scale.right) / 2;
  const title = `time (${name}${clock ? `, ${clock} clock` : ""})`;
  parts.push(words(middle, bottom + 30, title, { "font-size": 11, "text-anchor": "middle" }));
  return parts;
}

// The messages that are drawn in a stretch of time, and in words how many there are.
export function arrowsOf(trace, scale) {
  const seen = trace.messages.filter(({ left, came }) => came >= scale.first && left <= scale.last);
  const tracks = tracksWithArrows(seen);
  const drawn = seen.filter(({ track }) => tracks.includes(track));
  const most = drawn.length > ARROWS ? `the first ${ARROWS} of ` : "";
  const count = `${drawn.length.toLocaleString("en-US")} message${drawn.length === 1 ? "" : "s"}`;
  const lanes = tracks.length ? ` of ${tracks.map(laneOf).join(", ")}` : "";
  return { drawn: drawn.slice(0, ARROWS), words: `Arrows: ${most}${count}${lanes}.` };
}

function drawArrows(messages, rows, scale, head) {
  const place = new Map(rows.map((row) => [`${row.rank} ${row.track}`, row.y + row.height / 2]));
  const lines = [];
  for (const { source, left, dest, came, track } of messages) {
    const [from, to] = [place.get(`${source} ${track}`), place.get(`${dest} ${track}`)];
    if (from === undefined || to === undefined) continue;
    lines.push(rule(scale.x(left), from, scale.x(came), to, { "stroke-width": 0.8, "marker-end": `url(#${head})` }));
  }
  return lines;
}

// The definitions of a picture: its hatching, the head of its arrows, and the area where bars and arrows are drawn.
function definitions(id, height, right) {
  const area = { x: LABELS, y: 0, width: right - LABELS, height };
  const hatch = element("svg:pattern", { id: `${id}-wait`, width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" });
  hatch.append(element("svg:rect", { width: 6, height: 6, class: "trace-faint" }),
    element("svg:rect", { width: 1, height: 6, class: "trace-hatch" }));
  const head = element("svg:marker", { id: `${id}-head`, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 6,
    markerHeight: 6, orient: "auto" }, element("svg:path", { d: "M 0 0 L 10 5 L 0 10 z", fill: "currentColor" }));
  const clip = element("svg:clipPath", { id: `${id}-area` }, element("svg:rect", area));
  return element("svg:defs", {}, hatch, head, clip);
}

// The whole picture, `width` pixels wide. `chosen` is {row, slice}, which gets a frame; `unit` is that of both traces.
export function drawTrace(trace, { id, origin, view, width, unit, colours, arrows, chosen, label }) {
  const { rows, height, bottom } = layRows(trace);
  const scale = scaleOf(view, origin, width);
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label,
    class: "explorer-picture trace-picture" });
  svg.append(definitions(id, height, scale.right));
  for (const row of rows.filter(({ track }) => track === COMPUTATION)) {
    const area = { x: LABELS, y: row.y, width: scale.right - LABELS, height: row.height };
    svg.append(element("svg:g", { class: "idle" }, element("svg:rect", { ...area, class: "trace-paper" })));
  }
  const drawn = rows.map((row) => drawBars(row, scale, colours, `${id}-wait`));
  svg.append(...drawn.flatMap(({ bars }) => bars));
  for (const [start, end] of stepsOf(trace)) {
    for (const time of [start, end].filter((each) => each >= scale.first && each <= scale.last)) {
      const x = scale.x(time);
      svg.append(element("svg:g", { class: "grid" }, rule(x, 0, x, bottom, { "stroke-dasharray": "2 3" })));
    }
  }
  const overlay = element("svg:g", { "clip-path": `url(#${id}-area)` });
  if (arrows) overlay.append(...drawArrows(arrowsOf(trace, scale).drawn, rows, scale, `${id}-head`));
  const row = chosen && rows[chosen.row];
  if (row) {
    const x = scale.x(chosen.slice.start);
    const end = Math.max(scale.x(chosen.slice.end), x + 1);
    const frame = `M ${x - 1} ${row.y - 1} H ${end + 1} V ${row.y + row.height + 1} H ${x - 1} z`;
    overlay.append(element("svg:path", { d: frame, fill: "none", stroke: "currentColor", "stroke-width": 2 }));
  }
  const names = drawn.flatMap((row) => row.names);
  svg.append(overlay, ...names, ...drawNames(rows), ...drawAxis(scale, origin, bottom, unit, trace.clock));
  return svg;
}
