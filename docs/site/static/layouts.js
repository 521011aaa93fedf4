// Which layouts of a model on so many devices fit, and the pipeline's bubble: pure functions of the layout explorer.

import { explore, SCHEDULES } from "./schedules.js";
import { impossible, memory, volume } from "./traffic.js";
import { value } from "./memory.js";

export const PLANNED = SCHEDULES.filter((name) => name !== "dualpipev"); // whose pairs the planner does not know
export const PER_HOST = 8; // tensor parallelism stays inside a host
const LEAST_TOKENS = 8192; // a rank has as many of a sequence, as in Llama 3
const RECOMPUTE = ["none", "selective", "full"];

// Idle / total of the schedule, if every stage takes as long and F = I = W.
export function bubble({ schedule, pp, m, v }) {
  if (pp === 1) return 0;
  const stages = schedule === "interleaved-1f1b" ? v : schedule === "zbv" ? 2 : 1;
  return explore({ name: schedule, p: pp, m, v, F: stages, I: stages, W: stages, comm: 0 }).bubble;
}

// The same in closed form, for the schedules that have one: a simulation of many microbatches takes a second.
export function closedBubble({ schedule, pp, m, v }) {
  const turns = { naive: m === 1 ? 1 : undefined, gpipe: m, "1f1b": m, "interleaved-1f1b": v * m }[schedule];
  return turns === undefined ? undefined : (pp - 1) / (turns + pp - 1);
}

export const total = (parts) => Object.values(parts).reduce((sum, part) => sum + part, 0);

// Bytes that a rank sends in a step, by axis, as plain numbers.
export function sent(s) {
  return Object.fromEntries(Object.entries(volume(s)).map(([axis, amount]) => [axis, value(amount)]));
}

const powers = (most) => Array.from({ length: Math.floor(Math.log2(Math.max(1, most))) + 1 }, (_, k) => 2 ** k);

// All layouts of the setting's model on its devices with its global batch, over powers of two. Those that fit come
// first by what they recompute, then by the bytes that a rank sends. Returns {tried, found: [{layout, held, bytes}]}.
export function whatFits(setting, limit) {
  const batch = setting.dp * setting.b * setting.m;
  const devices = setting.dp * setting.tp * setting.pp * setting.cp;
  let tried = 0;
  const found = [];
  for (const { tp, pp, cp, dp } of meshes(setting, devices, batch)) {
    for (const b of powers(Math.min(8, batch / dp)).filter((size) => batch % (dp * size) === 0)) {
      const m = batch / (dp * b);
      for (const zero of dp * cp > 1 ? [0, 1, 2, 3] : [0]) {
        for (const recompute of RECOMPUTE) {
          const schedule = pp > 1 ? "1f1b" : setting.schedule;
          const ep = setting.experts ? Math.min(setting.ep, dp * cp) : 1;
          const layout = { ...setting, tp, pp, cp, dp, b, m, zero, recompute, schedule, ep, sequenceParallel: tp > 1 };
          if (impossible(layout)) continue;
          tried += 1;
          const held = total(memory(layout));
          if (held <= limit) found.push({ layout, held, bytes: total(sent(layout)) });
        }
      }
    }
  }
  const rank = ({ layout: { recompute } }) => RECOMPUTE.indexOf(recompute);
  found.sort((one, other) => rank(one) - rank(other) || one.bytes - other.bytes);
  return { tried, found: bestOfMeshes(found) };
}

function meshes(setting, devices, batch) {
  const all = [];
  for (const tp of powers(Math.min(PER_HOST, devices))) {
    for (const cp of powers(Math.max(1, setting.T / LEAST_TOKENS))) {
      for (const pp of powers(Math.min(devices / tp / cp, setting.layers))) {
        const dp = devices / (tp * cp * pp);
        if (Number.isInteger(dp) && batch % dp === 0) all.push({ tp, pp, cp, dp });
      }
    }
  }
  return all;
}

// The first layout of each mesh.
function bestOfMeshes(found) {
  const seen = new Set();
  return found.filter(({ layout: { dp, tp, pp, cp } }) => {
    const mesh = `${dp} ${tp} ${pp} ${cp}`;
    const isNew = !seen.has(mesh);
    seen.add(mesh);
    return isNew;
  });
}
