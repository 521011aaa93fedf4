// The explorers of schedules and of ZeRO's memory.

import { halvesOf } from "./actions.js";
import { COLOURS, activationsPlot, bars, kindLegend, legend, rankLegend, scrolling, timeline } from "./draw.js";
import { bytes, heading, headline, paragraph, percent, short, strong, table } from "./forms.js";
import { choice, explorer, real, whole, yes } from "./forms.js";
import { PRECISIONS, STAGES, formula, modelState, value } from "./memory.js";
import { SCHEDULES, explore } from "./schedules.js";

// ---- schedules ------------------------------------------------------------------------------------------------------

function showSchedule(settings) {
  const { name, p, m } = settings;
  const found = explore(settings);
  const { rows, total, bubble, peaks, stages } = found;
  const present = new Set(rows.flat().flatMap((slot) => halvesOf(slot.action).map((half) => half.kind)));
  const kinds = ["F", "B", "I", "W"].filter((kind) => present.has(kind));
  const most = Math.max(...peaks) / stages;
  const numbers = headline(paragraph(
    strong(`total time ${short(total)}`), " · ",
    strong(`bubble ${percent(bubble)}`), " (idle / total, over all ranks) · ",
    strong(`at most ${short(most)} activations alive`), " on a rank",
  ));
  const framed = stages > 1 ? paragraph(`${name} has ${stages} stages per rank, each of 1/${stages} of the rank's `
    + "layers: an action takes that part of the time. Later stages are lighter and have a bar.") : "";
  const overlap = name === "dualpipev" ? paragraph("A box in two halves is a pair: a forward and a backward at once, "
    + "each of which communicates while the other computes.") : "";
  return [
    numbers, framed, overlap, scrolling(timeline(found)), kindLegend(kinds),
    heading("Activations alive"),
    paragraph("From the start of a forward to the end of its backward (B, or I), in activations of all layers of a "
      + "rank for one microbatch."),
    scrolling(activationsPlot(found)), rankLegend(p),
    table(["rank", ...peaks.map((_, rank) => rank)], [["peak", ...peaks.map((peak) => short(peak / stages))]]),
  ];
}

explorer("schedule-explorer", [
  choice("name", "schedule", SCHEDULES, "1f1b"),
  whole("p", "p: ranks", 4, 1, 16),
  whole("m", "m: microbatches", 8, 1, 64),
  whole("v", "v: stages per rank", 2, 1, 8, ({ name }) => name === "interleaved-1f1b"),
  real("F", "F: time of a forward", 1, 0, 1000),
  real("I", "I: backward for the input", 1, 0, 1000),
  real("W", "W: backward for the weights", 1, 0, 1000),
  real("comm", "time of a message", 0, 0, 1000),
], showSchedule);

// ---- ZeRO -----------------------------------------------------------------------------------------------------------

function showState({ psi, d, precision: name, stage, accumulating, limit }) {
  const precision = PRECISIONS[name];
  const count = Math.round(psi * 1e9);
  if (count < 1) throw new Error("Ψ is less than one parameter");
  const states = STAGES.map((each) => modelState({ psi: count, d, stage: each, precision, accumulating }));
  const parts = states.map((state) => Object.fromEntries(Object.entries(state).map(([kind, it]) => [kind, value(it)])));
  const sums = parts.map((part) => part.parameters + part.gradients + part.optimizer);
  const chosen = Number(stage);
  const fits = STAGES.find((each) => sums[each] <= limit * 1e9);
  const verdict = !limit ? "" : fits === undefined ? "no stage fits" : `the first stage that fits is ${fits}`;
  const entries = STAGES.map((each) => ({ name: `stage ${each}`, parts: parts[each], mark: each === chosen }));
  const kinds = Object.keys(parts[0]);
  return [
    headline(paragraph(
      strong(`stage ${stage}: ${formula(chosen, precision, accumulating)} = ${bytes(sums[chosen])} per rank`),
      verdict && ` · model state alone in ${limit} GB: ${verdict}`)),
    bars(entries, bytes, limit * 1e9),
    legend(kinds.map((kind) => [`${kind} (${precision[kind]} bytes per element)`, COLOURS[kind]])),
    table(["", ...STAGES.map((each) => `stage ${each}`)],
      [...kinds.map((kind) => [kind, ...parts.map((part) => bytes(part[kind]))]), ["sum", ...sums.map(bytes)]]),
  ];
}

explorer("memory-explorer", [
  real("psi", "Ψ: parameters (billions)", 7.5, 1e-9, 1e4),
  whole("d", "d: data-parallel ranks", 64, 1, 65536),
  choice("precision", "precision", Object.keys(PRECISIONS)),
  choice("stage", "ZeRO stage", STAGES, 1),
  yes("accumulating", "gradients add up over microbatches before they are reduced"),
  real("limit", "memory of a device (GB; 0: none)", 80, 0, 1e4),
], showState);
