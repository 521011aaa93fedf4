// What the viewer says of traces: each trace's steps and shares, the comparison of two, and one slice.

import { bytes, paragraph, percent, short, strong, table } from "./forms.js";
import { actionOf, coordinates, laneOf, sharesOf, stepsOf, extentOf } from "./trace.js";
import { legendOf } from "./trace_colours.js";
import { unitOf } from "./trace_rows.js";

const SHARES = ["computing", "communicating", "waiting", "neither"];
const LISTED = 6; // steps whose times are listed one by one

export function seconds(time) {
  const [unit, times] = unitOf(Math.abs(time));
  return `${Number((time * times).toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 })} ${unit}`;
}

const meshWords = (places) => Object.entries(places).map(([axis, place]) => `${axis} ${place}`).join(", ");

export function rankWords({ mesh, ranks }, rank) {
  const size = Object.values(mesh).reduce((product, each) => product * each, 1);
  const place = size === ranks.length ? meshWords(coordinates(mesh, rank)) : "";
  return `rank ${rank}${place ? ` (${place})` : ""}`;
}

// The part of a trace that is looked at: a step, the last one, or all steps. {begin, end, words}.
export function partOf(trace, part) {
  const steps = stepsOf(trace);
  if (!steps.length) {
    const [begin, end] = extentOf(trace);
    return { begin, end, words: "The whole trace, which marks no step," };
  }
  if (steps.length === 1) return { begin: steps[0][0], end: steps[0][1], words: "The only step" };
  if (part === "all") {
    return { begin: steps[0][0], end: steps[steps.length - 1][1], words: `All ${steps.length} steps` };
  }
  const number = Math.min(part === "last" ? steps.length : Number(part), steps.length);
  const [begin, end] = steps[number - 1];
  return { begin, end, words: `Step ${number} of ${steps.length}` };
}

export function summary(trace, part) {
  const axes = Object.entries(trace.mesh).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`);
  const mesh = axes.length ? ` (${axes.join(", ")})` : "";
  const times = stepsOf(trace).map(([begin, end]) => end - begin);
  const mean = times.reduce((sum, time) => sum + time, 0) / times.length;
  const listed = times.length > LISTED ? `${seconds(mean)} on average` : times.map(seconds).join(", ");
  const { begin, end, words } = part;
  return paragraph(
    strong(`${words} take${words.startsWith("All") ? "" : "s"} ${seconds(end - begin)}`),
    ` on ${trace.ranks.length} rank${trace.ranks.length === 1 ? "" : "s"}${mesh}`,
    trace.clock ? `, ${trace.clock} clock` : "", times.length > 1 ? `; steps: ${listed}.` : ".",
  );
}

export function sharesTable(trace, { begin, end }) {
  const found = trace.ranks.map(({ tracks }) => sharesOf(tracks, begin, end));
  const mean = (kind) => found.reduce((sum, shares) => sum + shares[kind], 0) / found.length;
  const rows = found.map((shares, place) =>
    [rankWords(trace, trace.ranks[place].rank).slice("rank ".length), ...SHARES.map((kind) => percent(shares[kind]))]);
  return table(["rank", ...SHARES], [...rows, [strong("mean"), ...SHARES.map((kind) => strong(percent(mean(kind))))]]);
}

export function comparison(above, below) {
  const [one, other] = [above, below].map(({ begin, end }) => end - begin);
  const times = Number((other / one).toPrecision(3));
  return paragraph("What is shown below takes ", strong(`${times} times as long`), " as what is shown above: ",
    `${seconds(other)} against ${seconds(one)}.`);
}

// One slice: rank, axis, operation, bytes, seconds, waiting.
export function sliceWords(trace, { rank, track }, slice, origin) {
  const action = actionOf(slice.name);
  const what = action
    ? `${slice.name}, ${legendOf(action.kind)} of microbatch ${action.microbatch} through stage ${action.stage}`
    : `${slice.name}${slice.algorithm ? ` (${slice.algorithm})` : ""}`;
  const sent = slice.bytes === undefined ? "" : `, ${bytes(slice.bytes)} sent`;
  const work = slice.flops === undefined ? "" : `, ${short(slice.flops / 1e9)} GFLOP`;
  const waited = slice.wait > 0 ? `, ${seconds(slice.wait)} of it waiting` : "";
  return [
    strong(what), `${sent}${work} · ${rankWords(trace, rank)}, ${laneOf(track)} · ${seconds(slice.end - slice.start)}`
      + `${waited}, from ${seconds(slice.start - origin)} to ${seconds(slice.end - origin)}`,
  ];
}
