// Read traces and choose colours with the viewer's pure functions; test_trace_viewer.py compares.

import { readFileSync } from "node:fs";
import { parseTrace, readTrace, rowsOf, sharesOf, stepsOf, coordinates, extentOf, tracksWithArrows }
  from "../../../docs/site/static/trace.js";
import { NAMED, PHASES, coloursOf, edgeOf, inkOn } from "../../../docs/site/static/trace_colours.js";

function answer({ data, spans }) {
  const trace = parseTrace(data, "the trace");
  const slice = ({ name, start, end, wait }) => [name, start, end, wait];
  const ranks = trace.ranks.map(({ rank, tracks }) =>
    [rank, [...tracks].map(([track, slices]) => [track, slices.map(slice)])]);
  const messages = trace.messages.map(({ source, left, dest, came, axis, bytes, track }) =>
    [source, left, dest, came, axis, bytes ?? null, track]);
  const shares = spans.map(([begin, end]) => trace.ranks.map(({ tracks }) => sharesOf(tracks, begin, end)));
  return {
    ranks, messages, shares, clock: trace.clock, mesh: trace.mesh, steps: stepsOf(trace), extent: extentOf(trace),
    rows: rowsOf(trace), arrows: tracksWithArrows(trace.messages),
    places: trace.ranks.map(({ rank }) => coordinates(trace.mesh, rank)),
  };
}

function refusal(text) {
  try {
    readTrace(text, "the file");
    return "";
  } catch (error) {
    return error.message;
  }
}

const { traces, texts, names } = JSON.parse(readFileSync(0, "utf8"));
const colours = Object.values(NAMED);
console.log(JSON.stringify({
  traces: traces.map(answer), texts: texts.map(refusal), names: names.map(coloursOf), NAMED, PHASES,
  edges: colours.map(edgeOf), inks: colours.map(inkOn),
}));
