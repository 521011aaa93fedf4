// A trace that `minipar.train --trace` wrote, read as visualize/timeline.py reads it, and what its ranks do with their
// time, as in visualize/shares.py. Pure functions: tests/release/pages/test_trace_viewer.py compares them with
// Python's.

export const COMPUTATION = "computation";
export const COMMUNICATION = "communication";
const STEP_END = "optimizer"; // a step of training ends with this slice
const LARGEST = 1e18; // of any number in a file
const ORDER = ["tp", "cp", "ep", "dp", "pp"]; // of the lanes: the mesh's fastest axis first
const MOST_ARROWS = 300; // of collectives: more are a hedge

// ---- reading --------------------------------------------------------------------------------------------------------

class NotATrace extends Error {}

function numberIn(value, name, least = -LARGEST) {
  const fits = typeof value === "number" && value >= least && value <= LARGEST;
  if (!fits) throw new NotATrace(`${name} is not a number from ${least} to ${LARGEST}`);
  return value;
}

function fieldsOf(value, name) {
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  if (!isObject) throw new NotATrace(`${name} has no fields`);
  return value;
}

const argumentsOf = (event) => (event.args === undefined ? {} : fieldsOf(event.args, "args"));

function present(event, name) {
  if (event[name] === undefined) throw new NotATrace(name);
  return event[name];
}

// Outer slices come before inner ones; but one that took no time came before what starts at the same moment.
function byTime(one, other) {
  const long = (slice) => (slice.end > slice.start ? 1 : 0);
  return one.start - other.start || long(one) - long(other) || other.end - one.end;
}

function sliceOf(event, start) {
  const args = argumentsOf(event);
  const length = numberIn(event.dur, "dur", 0) / 1e6;
  const wait = Math.min(args.wait === undefined ? 0 : numberIn(args.wait, "wait", 0), length);
  const { op, algorithm, bytes, flops } = args;
  return { name: String(present(event, "name")), start, end: start + length, wait, op, algorithm, bytes, flops };
}

// Sort events into the slices of each rank and track, and the two ends of each message.
function sortEvents(events) {
  const names = new Map();
  for (const event of events.filter(({ ph, name }) => ph === "M" && name === "thread_name")) {
    names.set(`${present(event, "pid")} ${present(event, "tid")}`, String(present(argumentsOf(event), "name")));
  }
  const ranks = new Map();
  const starts = new Map();
  const ends = new Map();
  for (const event of events.filter(({ ph }) => ["X", "s", "f"].includes(ph))) {
    const rank = Math.trunc(numberIn(event.pid, "pid"));
    const start = numberIn(event.ts, "ts") / 1e6;
    const track = names.get(`${event.pid} ${event.tid}`) ?? "";
    if (event.ph === "X") {
      if (!ranks.has(rank)) ranks.set(rank, new Map());
      const tracks = ranks.get(rank);
      if (!tracks.has(track)) tracks.set(track, []);
      tracks.get(track).push(sliceOf(event, start));
    } else if (event.ph === "s") {
      const { bytes } = argumentsOf(event);
      const amount = bytes === undefined ? undefined : numberIn(bytes, "bytes", 0);
      starts.set(present(event, "id"), { source: rank, left: start, track, bytes: amount });
    } else {
      ends.set(present(event, "id"), { dest: rank, came: start });
    }
  }
  return { ranks, starts, ends };
}

// Build a trace from Chrome's JSON: {ranks: [{rank, tracks: Map}], messages, clock, mesh}; times in seconds.
export function parseTrace(data, name) {
  const events = Array.isArray(data) ? data : data?.traceEvents;
  const isList = Array.isArray(events)
    && events.every((event) => typeof event === "object" && event !== null && !Array.isArray(event));
  if (!isList) throw new Error(`${name} has no list of traceEvents: not a Chrome trace`);
  let found;
  let about;
  let mesh;
  try {
    found = sortEvents(events);
    about = fieldsOf(data.otherData ?? {}, "otherData");
    mesh = Object.entries(fieldsOf(about.mesh ?? {}, "mesh")).map(([axis, size]) => [axis, numberIn(size, axis)]);
  } catch (error) {
    if (!(error instanceof NotATrace)) throw error;
    throw new Error(`${name} has an event without its fields (${error.message}): not a trace of minipar`);
  }
  const tracks = [...found.ranks.values()].flatMap((each) => [...each.keys()]);
  if (!tracks.some((track) => track.startsWith(COMPUTATION) || track.startsWith(COMMUNICATION))) {
    throw new Error(`${name} has no computation or communication track: not a trace of minipar`);
  }
  for (const each of found.ranks.values()) for (const slices of each.values()) slices.sort(byTime);
  const ranks = [...found.ranks].sort(([one], [other]) => one - other).map(([rank, each]) => ({ rank, tracks: each }));
  const pairs = [...found.starts].filter(([id]) => found.ends.has(id));
  const messages = pairs.map(([id, start]) => ({ ...start, ...found.ends.get(id), axis: axisOf(start.track) }));
  return { ranks, messages, clock: String(about.clock ?? ""), mesh: Object.fromEntries(mesh) };
}

// Read a file's text. Any other file than a trace is an Error of one line.
export function readTrace(text, name) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON, and so no trace: choose a file that minipar.train --trace has written`);
  }
  return parseTrace(data, name);
}

// ---- names ----------------------------------------------------------------------------------------------------------

// The mesh axis in a track's name, such as "communication dp, send and receive".
export const axisOf = (track) =>
  (track.startsWith(COMMUNICATION) ? track.slice(COMMUNICATION.length) : track).split(",")[0].trim();

// "compute", "tp", or "pp p2p" for what is sent and received between single ranks.
export const laneOf = (track) =>
  (track === COMPUTATION ? "compute" : axisOf(track) + (track.includes(",") ? " p2p" : ""));

// The rows of every rank: its computation, and a lane for each axis on which somebody communicates.
export function rowsOf(trace) {
  const all = new Set(trace.ranks.flatMap(({ tracks }) => [...tracks.keys()]));
  const lanes = [...all].filter((track) => track.startsWith(COMMUNICATION));
  const order = (track) => (ORDER.includes(axisOf(track)) ? ORDER.indexOf(axisOf(track)) : ORDER.length);
  lanes.sort((one, other) => order(one) - order(other) || (one < other ? -1 : 1));
  return [COMPUTATION, ...lanes];
}

// A rank's place on each axis of more than one rank: {pp: 0, dp: 1}; empty if the trace does not say.
export function coordinates(mesh, rank) {
  const places = {};
  let rest = rank;
  for (const axis of Object.keys(mesh).reverse()) {
    places[axis] = rest % mesh[axis];
    rest = Math.floor(rest / mesh[axis]);
  }
  return Object.fromEntries(Object.keys(mesh).filter((axis) => mesh[axis] > 1).map((axis) => [axis, places[axis]]));
}

// The pipeline's action that a slice is named by, as "2F0"; undefined for any other name.
export function actionOf(name) {
  const found = /^(\d{1,9})([FBIW])(\d{1,9})$/.exec(name);
  return found ? { stage: Number(found[1]), kind: found[2], microbatch: Number(found[3]) } : undefined;
}

// What a slice is coloured by: its name, or the kind of the action that it is.
export const whatOf = (name) => actionOf(name)?.kind ?? name;

// ---- time -----------------------------------------------------------------------------------------------------------

// [start, end] of each step, from the first rank that begins it to the last that ends it.
export function stepsOf(trace) {
  const spans = trace.ranks.map(({ tracks }) => {
    const steps = [];
    let start;
    for (const slice of tracks.get(COMPUTATION) ?? []) {
      start ??= slice.start;
      if (slice.name === STEP_END) {
        steps.push([start, slice.end]);
        start = undefined;
      }
    }
    return steps;
  });
  const count = Math.min(...spans.map((steps) => steps.length));
  return Array.from({ length: count }, (_, k) => {
    const all = spans.map((steps) => steps[k]);
    return [Math.min(...all.map(([begin]) => begin)), Math.max(...all.map(([, end]) => end))];
  });
}

// [begin, end] of all that is in the trace.
export function extentOf(trace) {
  let [begin, end] = [Infinity, -Infinity];
  for (const { tracks } of trace.ranks) {
    for (const slice of [...tracks.values()].flat()) {
      begin = Math.min(begin, slice.start);
      end = Math.max(end, slice.end);
    }
  }
  return [begin, end];
}

// The seconds from `begin` to `end` that lie in at least one of the spans [start, stop].
export function covered(spans, begin, end) {
  let total = 0;
  let reached = begin;
  for (const span of [...spans].sort((one, other) => one[0] - other[0] || one[1] - other[1])) {
    const start = Math.max(span[0], reached);
    const stop = Math.min(span[1], end);
    if (stop > start) {
      total += stop - start;
      reached = stop;
    }
  }
  return total;
}

// What one rank does from `begin` to `end`, as parts of that time, which overlap: see Shares in visualize/shares.py.
export function sharesOf(tracks, begin, end) {
  const computing = (tracks.get(COMPUTATION) ?? []).map((slice) => [slice.start, slice.end]);
  const isLane = ([track]) => track.startsWith(COMMUNICATION);
  const lanes = [...tracks].filter(isLane).flatMap(([, slices]) => slices);
  const waiting = lanes.map((slice) => [slice.start, slice.start + slice.wait]);
  const communicating = lanes.map((slice) => [slice.start + slice.wait, slice.end]);
  const whole = end - begin;
  return {
    computing: covered(computing, begin, end) / whole,
    communicating: covered(communicating, begin, end) / whole,
    waiting: covered(waiting, begin, end) / whole,
    neither: Math.max(0, 1 - covered([...computing, ...waiting, ...communicating], begin, end) / whole),
  };
}

// ---- messages -------------------------------------------------------------------------------------------------------

// The tracks whose messages are drawn as arrows: see visualize/arrows.py.
export function tracksWithArrows(messages) {
  const count = new Map();
  for (const { track } of messages) count.set(track, (count.get(track) ?? 0) + 1);
  const single = [...count.keys()].filter((track) => track.includes(","));
  if (single.length) return single;
  const chosen = [];
  let total = 0;
  for (const track of [...count.keys()].sort((a, b) => count.get(a) - count.get(b) || (a < b ? -1 : 1))) {
    total += count.get(track);
    if (chosen.length && total > MOST_ARROWS) break;
    chosen.push(track);
  }
  return chosen;
}
