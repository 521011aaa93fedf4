// The page of explorers: a form for each, which computes and draws again at every change.

import { COLOURS, activationsPlot, bars, element, kindLegend, legend, rankLegend, timeline } from "./draw.js";
import { PRECISIONS, STAGES, formula, modelState, value } from "./memory.js";
import { SCHEDULES, explore, stagesPerRank } from "./schedules.js";
import { MODELS, impossible, memory, parameters, volume } from "./traffic.js";

// ---- words and tables -----------------------------------------------------------------------------------------------

const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]];

// Write bytes in powers of ten, as the papers do.
function bytes(amount) {
  const [unit, size] = UNITS.find(([, least]) => amount >= least) ?? UNITS[UNITS.length - 1];
  return `${Number((amount / size).toPrecision(4))} ${unit}`;
}

const short = (number) => Number(number.toPrecision(5)).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function table(header, rows) {
  const cells = (tag, row) => element("tr", {}, ...row.map((cell) => element(tag, {}, String(cell))));
  const body = element("tbody", {}, ...rows.map((row) => cells("td", row)));
  return element("table", { class: "table explorer-table" }, element("thead", {}, cells("th", header)), body);
}

const paragraph = (...children) => element("p", {}, ...children);
const strong = (words) => element("strong", {}, words);

// ---- forms ----------------------------------------------------------------------------------------------------------

// A field of a form. whole: a number from least to most; real: the same with decimals; choice; yes: a box to tick.
const whole = (name, label, start, least, most) => ({ type: "whole", name, label, start, least, most });
const real = (name, label, start, least, most) => ({ type: "real", name, label, start, least, most });
const choice = (name, label, options, start = options[0]) => ({ type: "choice", name, label, options, start });
const yes = (name, label, start = false) => ({ type: "yes", name, label, start });

function control({ type, name, start, least, most, options }) {
  if (type === "choice") {
    const select = element("select", { name }, ...options.map((option) => element("option", {}, String(option))));
    select.value = start;
    return select;
  }
  if (type === "yes") {
    const box = element("input", { name, type: "checkbox" });
    box.checked = start;
    return box;
  }
  const step = type === "whole" ? 1 : "any";
  return element("input", { name, type: "number", min: least, max: most, step, value: start });
}

// Read a field. An empty or impossible number is an error in words.
function read({ type, label, least, most }, input) {
  if (type === "yes") return input.checked;
  if (type === "choice") return input.value;
  const number = input.value.trim() === "" ? NaN : Number(input.value);
  const fits = number >= least && number <= most && (type === "real" || Number.isInteger(number));
  const kind = type === "whole" ? "a whole number" : "a number";
  if (!fits) throw new Error(`${label} = ${input.value || "nothing"}: expected ${kind} from ${least} to ${most}`);
  return number;
}

// Build an explorer in the element `id`. show(settings) returns the elements to show, or throws an Error whose message
// is shown instead. change(name, inputs) may set other fields when one was changed.
function explorer(id, fields, show, change = () => {}) {
  const place = document.getElementById(id);
  if (!place) return;
  const inputs = Object.fromEntries(fields.map((field) => [field.name, control(field)]));
  const form = element("form", { class: "explorer-form" });
  for (const { name, label } of fields) form.append(element("label", {}, element("span", {}, label), inputs[name]));
  const result = element("div", { class: "explorer-result", "aria-live": "polite" });
  const update = () => {
    try {
      const settings = Object.fromEntries(fields.map((field) => [field.name, read(field, inputs[field.name])]));
      result.replaceChildren(...show(settings));
    } catch (error) {
      result.replaceChildren(element("p", { class: "explorer-error", role: "alert" }, error.message));
    }
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    change(event.target.name, inputs);
    update();
  });
  place.replaceChildren(form, result);
  update();
}

// ---- schedules ------------------------------------------------------------------------------------------------------

function showSchedule(settings) {
  const { name, p, m } = settings;
  const found = explore(settings);
  const { rows, total, bubble, peaks, stages } = found;
  const kinds = ["F", "B", "I", "W"].filter((kind) => rows[0].some((slot) => slot.action.kind === kind));
  const most = Math.max(...peaks) / stages;
  const summary = paragraph(
    strong(`total time ${short(total)}`), " · ",
    strong(`bubble ${percent(bubble)}`), " (idle / total, over all ranks) · ",
    strong(`at most ${short(most)} activations in flight`), " on a rank",
  );
  const framed = stages > 1 ? paragraph(`${name} has ${stages} stages per rank, each of 1/${stages} of the rank's `
    + "layers: an action takes that part of the time. Later stages have a frame.") : "";
  return [
    summary, framed, timeline(found), kindLegend(kinds),
    element("h4", {}, "Activations in flight"),
    paragraph("From the start of a forward to the end of its backward (B, or I), in activations of all layers of a "
      + "rank for one microbatch."),
    activationsPlot(found), p <= 6 ? rankLegend(p) : "",
    table(["rank", ...peaks.map((_, rank) => rank)], [["peak", ...peaks.map((peak) => short(peak / stages))]]),
  ];
}

explorer("schedule-explorer", [
  choice("name", "schedule", SCHEDULES, "1f1b"),
  whole("p", "p: ranks", 4, 1, 16),
  whole("m", "m: microbatches", 8, 1, 64),
  whole("v", "v: stages per rank (interleaved-1f1b)", 2, 1, 8),
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
    paragraph(strong(`stage ${stage}: ${formula(chosen, precision, accumulating)} = ${bytes(sums[chosen])} per rank`),
      verdict && ` · model state alone in ${limit} GB: ${verdict}`),
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
  real("limit", "memory of a GPU (GB; 0: none)", 80, 0, 1e4),
], showState);

// ---- layouts --------------------------------------------------------------------------------------------------------

function showLayout(settings) {
  const s = { ...settings, zero: Number(settings.zero), precision: PRECISIONS[settings.precision] };
  s.schedule = s.pp === 1 ? "1f1b" : s.schedule;
  s.positions = s.T;
  const problem = impossible(s);
  if (problem) throw new Error(problem);
  const sent = Object.fromEntries(Object.entries(volume(s)).map(([axis, amount]) => [axis, value(amount)]));
  const held = memory(s);
  const samples = s.dp * s.m * s.b;
  const sum = Object.values(held).reduce((total, part) => total + part, 0);
  const what = {
    tp: "sums of activations, in every layer",
    dp: "gradients and parameters",
    pp: "activations to the next stage, and their gradients back",
  };
  const axes = ["tp", "dp", "pp"];
  return [
    paragraph(strong(`${short(parameters(s) / 1e9)} billion parameters on dp * tp * pp = ${s.dp} * ${s.tp} * ${s.pp} = `
      + `${s.dp * s.tp * s.pp} ranks`), `, a global batch of dp * microbatches * samples = ${samples} samples, `
      + `${short(samples * s.T)} tokens`),
    element("h4", {}, "Sent by a rank in a step"),
    bars(axes.map((axis) => ({ name: `${axis} = ${s[axis]}`, parts: { [axis]: sent[axis] }, mark: true })), bytes),
    table(["axis", "what", "bytes"], axes.map((axis) => [axis, what[axis], bytes(sent[axis])])),
    element("h4", {}, "Held by the rank that needs most"),
    bars([{ name: "one rank", parts: held, mark: true }], bytes, s.limit * 1e9),
    legend(Object.keys(held).map((kind) => [`${kind}: ${bytes(held[kind])}`, COLOURS[kind]])),
    paragraph(s.limit ? `It ${sum <= s.limit * 1e9 ? "fits" : "does not fit"} into ${s.limit} GB.` : ""),
  ];
}

const SIZES = ["layers", "h", "heads", "vocab", "T"];

// Choosing a model sets its sizes; changing a size makes it a model of one's own.
function setSizes(changed, inputs) {
  if (changed === "model" && inputs.model.value in MODELS) {
    MODELS[inputs.model.value].forEach((size, index) => { inputs[SIZES[index]].value = size; });
  } else if (SIZES.includes(changed)) {
    inputs.model.value = "another";
  }
}

explorer("layout-explorer", [
  choice("model", "model", [...Object.keys(MODELS), "another"], "gpt3-175b"),
  whole("layers", "layers", 96, 1, 1024),
  whole("h", "h: hidden size", 12288, 1, 65536),
  whole("heads", "attention heads", 96, 1, 1024),
  whole("vocab", "V: vocabulary", 51200, 1, 1000000),
  whole("T", "T: tokens in a sequence", 2048, 1, 1000000),
  whole("dp", "dp: replicas", 8, 1, 65536),
  whole("tp", "tp: ranks that share each layer", 8, 1, 1024),
  whole("pp", "pp: pipeline ranks", 8, 1, 1024),
  choice("schedule", "pipeline schedule", SCHEDULES, "1f1b"),
  whole("v", "v: stages per rank (interleaved-1f1b)", 2, 1, 64),
  whole("b", "samples in a microbatch", 1, 1, 1024),
  whole("m", "m: microbatches per replica", 24, 1, 4096),
  yes("sequenceParallel", "sequence parallelism", true),
  choice("zero", "ZeRO stage", STAGES, 1),
  choice("recompute", "recomputation", ["none", "selective", "full"], "selective"),
  choice("attention", "attention's scores", ["stored", "flash"]),
  choice("precision", "precision", Object.keys(PRECISIONS).slice(0, 2)),
  real("limit", "memory of a GPU (GB; 0: none)", 80, 0, 1e4),
], showLayout, setSizes);
