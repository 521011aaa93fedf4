// The layout explorer: what a layout of a model holds and sends, its bubble, and which layouts would fit.

import { COLOURS, bars, element, legend } from "./draw.js";
import { bytes, heading, headline, paragraph, percent, short, strong, table } from "./forms.js";
import { choice, explorer, power, real, whole, yes } from "./forms.js";
import { PLANNED, bubble, closedBubble, sent, total, whatFits } from "./layouts.js";
import { PRECISIONS, STAGES } from "./memory.js";
import { MODELS, parameters } from "./models.js";
import { impossible, memory } from "./traffic.js";

const AXES = {
  tp: "sums of activations, in every layer",
  pp: "activations to the next stage, and their gradients back",
  cp: "keys and values, and their gradients",
  ep: "tokens to their experts and back",
  dp: "gradients and parameters",
};
const SHOWN = 6; // layouts that would fit
const MOST_SIMULATED = 6000; // actions

// The setting of a layout: a field that is hidden has its neutral value.
function settingOf({ model, devices, zero, ...rest }) {
  const s = { ...MODELS[model], ...rest, zero: Number(zero), precision: PRECISIONS[rest.precision] };
  s.ep = s.experts ? s.ep : 1;
  s.dp = devices / (s.tp * s.pp * s.cp);
  if (s.dp < 1) throw new Error(`tp * pp * cp = ${s.tp} * ${s.pp} * ${s.cp} = ${s.tp * s.pp * s.cp} is more than the `
    + `${short(devices)} devices`);
  s.schedule = s.pp === 1 ? "1f1b" : s.schedule;
  s.sequenceParallel = s.sequenceParallel && s.tp > 1;
  const problem = impossible(s);
  if (problem) throw new Error(problem);
  return s;
}

// The command that asks the planner for the seconds of this layout.
function command(name, s) {
  const flags = {
    model: name, gpus: s.dp * s.tp * s.pp * s.cp, gpu: "h100", "global-batch": s.dp * s.b * s.m,
    "seq-len": s.T, dp: s.dp, tp: s.tp, pp: s.pp, cp: s.cp, microbatch: s.b,
    "zero-stage": s.zero, recompute: s.recompute, attention: s.attention,
    ...(s.experts ? { ep: s.ep } : {}), ...(s.pp > 1 ? { schedule: s.schedule } : {}),
    ...(s.tp > 1 ? { "sequence-parallel": s.sequenceParallel ? "on" : "off" } : {}),
  };
  return `python -m minipar.plan ${Object.entries(flags).map(([flag, value]) => `--${flag} ${value}`).join(" ")}`;
}

function fits(s, limit, change) {
  const { tried, found } = whatFits(s, limit * 1e9);
  const words = `Of ${short(tried)} layouts with this model, these devices and this batch, the best of `
    + `${short(found.length)} meshes fit into ${limit} GB.`;
  if (!found.length) {
    return [paragraph(`None of ${short(tried)} layouts fits into ${limit} GB: take more devices, or a smaller batch.`)];
  }
  const rows = found.slice(0, SHOWN).map(({ layout, held, bytes: amount }) => {
    const { tp, pp, cp, dp, zero, recompute, b, m, ep, schedule, sequenceParallel } = layout;
    const button = element("button", { type: "button" }, "show");
    const values = { tp, pp, cp, ep, zero, recompute, b, m, schedule, sequenceParallel };
    button.addEventListener("click", () => change(values));
    return [`dp ${dp}, tp ${tp}, pp ${pp}${cp > 1 ? `, cp ${cp}` : ""}`, zero, recompute, `${b} x ${m}`, bytes(held),
      bytes(amount), percent(closedBubble(layout)), button];
  });
  return [
    paragraph(words, " Those that recompute least come first, then those that send fewest bytes."),
    table(["mesh", "ZeRO", "recompute", "microbatch", "held", "sent", "bubble", ""], rows),
  ];
}

function showLayout(settings, change) {
  const { model, limit } = settings;
  const s = settingOf(settings);
  const held = memory(s);
  const sum = total(held);
  const moved = sent(s);
  const samples = s.dp * s.m * s.b;
  const axes = Object.keys(AXES).filter((axis) => moved[axis] > 0);
  const idle = s.pp * s.m * s.v > MOST_SIMULATED ? closedBubble(s) : bubble(s);
  const card = (words, value, kind = "") => element("div", { class: `explorer-card ${kind}` }, strong(value),
    element("span", {}, words));
  const enough = sum <= limit * 1e9;
  const verdict = limit ? `: ${enough ? "fits" : "does not fit"} into ${limit} GB` : "";
  const bar = (axis) => ({ name: `${axis} = ${s[axis]}`, parts: { [axis]: moved[axis] }, mark: true });
  return [
    headline(
      paragraph(strong(`${short(parameters(s) / 1e9)} billion parameters`), ` on dp ${s.dp} x tp ${s.tp} x pp ${s.pp}`
        + `${s.cp > 1 ? ` x cp ${s.cp}` : ""} = ${short(settings.devices)} devices; a batch of ${short(samples)} `
        + `sequences, ${short(samples * s.T)} tokens.`),
      element("div", { class: "explorer-cards" },
        card(`on the fullest device${verdict}`, bytes(sum), !limit ? "" : enough ? "good" : "bad"),
        card("of the devices' time is the pipeline's bubble", idle === undefined ? "not simulated" : percent(idle)),
        card("sent by a rank in a step", bytes(total(moved))))),
    heading("Held by the device that needs most"),
    bars([{ name: "one device", parts: held, mark: true }], bytes, limit * 1e9),
    legend(Object.keys(held).map((kind) => [`${kind}: ${bytes(held[kind])}`, COLOURS[kind]])),
    heading("Sent by a rank in a step"),
    axes.length ? bars(axes.map(bar), bytes) : paragraph("Nothing: there is one device."),
    axes.length ? table(["axis", "what", "bytes"], axes.map((axis) => [axis, AXES[axis], bytes(moved[axis])])) : "",
    ...(limit ? [heading("What would fit"), ...fits(s, limit, change)] : []),
    heading("Seconds"),
    paragraph("The planner predicts them on GPUs and links of your choice:"),
    element("pre", { class: "scrolls", tabindex: 0 }, command(model, s)),
  ];
}

const DEVICE = { T: 4096, b: 1, attention: "flash", precision: "mixed, gradients in 32 bits", limit: 80, cp: 1, ep: 1 };
const PRESETS = {
  "GPT-2 on a laptop, 8 processes": { ...DEVICE, model: "gpt2", devices: 8, tp: 2, pp: 2, m: 4, zero: 1, T: 1024,
    limit: 2, attention: "stored", recompute: "none", schedule: "1f1b", sequenceParallel: true },
  "Llama 2 70B on 64": { ...DEVICE, model: "llama-2-70b", devices: 64, tp: 8, pp: 4, m: 32, zero: 1,
    recompute: "none", schedule: "1f1b", sequenceParallel: true },
  "Llama 3 405B on 16,384": { ...DEVICE, model: "llama-3-405b", devices: 16384, tp: 8, pp: 16, m: 16, zero: 1, T: 8192,
    recompute: "none", schedule: "1f1b", sequenceParallel: true },
  "Mixtral 8x7B on 64": { ...DEVICE, model: "mixtral-8x7b", devices: 64, tp: 2, pp: 2, ep: 8, m: 16, zero: 1,
    recompute: "none", schedule: "1f1b", sequenceParallel: true },
};
const START = PRESETS["Llama 2 70B on 64"];

explorer("layout-explorer", [
  choice("model", "model", Object.keys(MODELS), START.model),
  power("devices", "devices", START.devices, 32768),
  power("tp", "tp: share each layer", START.tp, 16),
  power("pp", "pp: pipeline stages", START.pp, 64),
  power("cp", "cp: share each sequence", START.cp, 32),
  power("ep", "ep: share the experts", START.ep, 8, ({ model }) => MODELS[model].experts > 0),
  choice("zero", "ZeRO stage over dp", STAGES.map(String), String(START.zero)),
  choice("recompute", "recomputation", ["none", "selective", "full"], START.recompute),
  choice("schedule", "pipeline schedule", PLANNED, START.schedule, ({ pp }) => pp > 1),
  whole("v", "v: stages per rank", 2, 1, 64, ({ pp, schedule }) => pp > 1 && schedule === "interleaved-1f1b"),
  power("b", "sequences in a microbatch", START.b, 64),
  whole("m", "microbatches per replica", START.m, 1, 1024),
  whole("T", "tokens in a sequence", START.T, 1, 1048576),
  yes("sequenceParallel", "sequence parallelism", START.sequenceParallel, ({ tp }) => tp > 1),
  choice("context", "context parallelism", ["ring", "all-gather", "ulysses"], "ring", ({ cp }) => cp > 1),
  choice("attention", "attention's scores", ["stored", "flash"], START.attention),
  choice("precision", "precision", Object.keys(PRECISIONS).slice(0, 2), START.precision),
  real("limit", "memory of a device (GB; 0: any)", START.limit, 0, 1e4),
], showLayout, PRESETS);
