// Bytes that a rank of a layout sends in a step, by axis, and holds: minipar/plan/rank_bytes.py in JavaScript, for
// models of GPT-2's kind and a framework with Megatron-LM's habits. tests/test_explorers.py compares it with Python.

import { fraction, modelState, value } from "./memory.js";

// layers, hidden, heads, vocabulary, positions. Sources: minipar/plan/model.py.
export const MODELS = {
  "gpt2": [12, 768, 12, 50257, 1024],
  "gpt2-xl": [48, 1600, 25, 50257, 1024],
  "megatron-7.5b": [36, 4096, 32, 51200, 2048],
  "megatron-39b": [48, 8192, 64, 51200, 2048],
  "gpt3-175b": [96, 12288, 96, 51200, 2048],
  "megatron-530b": [105, 20480, 128, 51200, 2048],
  "megatron-1t": [128, 25600, 160, 51200, 2048],
};

// ---- parameters -----------------------------------------------------------------------------------------------------

const layerParameters = ({ h }) => 12 * h * h + 13 * h;
const layersPerRank = ({ layers, pp }) => Math.ceil(layers / pp);
const slices = ({ tp, sequenceParallel }) => (sequenceParallel ? tp : 1);
const stages = ({ schedule, v }) => (schedule === "zbv" ? 2 : schedule === "interleaved-1f1b" ? v : 1);

export const parameters = (s) => (s.vocab + s.positions) * s.h + s.layers * layerParameters(s) + 2 * s.h;

// Norms (two, with biases) and the two biases of row-parallel layers are whole on every tp rank: 6 h.
const layerOnRank = (s) => Math.ceil((layerParameters(s) - 6 * s.h) / s.tp) + 6 * s.h;

// The first pipeline rank has most: the embeddings and its layers; without a pipeline the last norm too.
export function rankParameters(s) {
  const embeddings = Math.ceil((s.vocab * s.h) / s.tp) + s.positions * s.h;
  return embeddings + layersPerRank(s) * layerOnRank(s) + (s.pp === 1 ? 2 * s.h : 0);
}

// ---- traffic --------------------------------------------------------------------------------------------------------

// Bytes that a rank sends in a step over each axis, as fractions. tp and pp: a rank in the middle of the pipeline; dp:
// the first rank. s has b samples of T tokens in a microbatch and m microbatches.
export function volume(s) {
  const d = s.dp;
  const [t, m] = [BigInt(s.tp), BigInt(s.m)];
  const hidden = BigInt(s.b) * BigInt(s.T) * BigInt(s.h * s.precision.parameters);
  // Per layer: two sums forward and two backward, 2 (t-1)/t each; recomputation repeats the forward ones.
  const sums = s.recompute === "full" ? 12n : 8n;
  const tp = sums * hidden * (t - 1n) * m * BigInt(layersPerRank(s));
  // Each tp rank sends its 1/t of an activation, forward and back.
  const pp = s.pp > 1 ? 2n * hidden * m * BigInt(stages(s)) : 0n;
  // From stage 2 on gradients are reduced, and in stage 3 parameters gathered, for every microbatch.
  const gathers = [0, 1, 1, 2 * s.m][s.zero];
  const reductions = [2, 1, s.m, s.m][s.zero];
  const width = gathers * s.precision.parameters + reductions * s.precision.gradients;
  return {
    tp: fraction(tp, s.tp),
    pp: fraction(pp, s.tp),
    dp: fraction(BigInt(width) * BigInt(rankParameters(s)) * BigInt(d - 1), d),
  };
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// Bytes that a layer keeps of one microbatch: s b h (10 + 24/t + 5as/(ht)), Korthikanti et al. 2022 (arXiv 2205.05198).
export function layerActivations(s) {
  const tokens = s.T * s.b * s.precision.parameters;
  if (s.recompute === "full") return (tokens * s.h) / slices(s);
  const core = s.recompute === "none" && s.attention === "stored" ? 2.5 * s.heads * s.T : 0;
  return tokens * ((5 * s.h) / slices(s) + (12 * s.h + core) / s.tp); // 12 h: q, k, v; their output; twice 4 h
}

// The microbatches whose activations the first rank keeps.
export function inFlight({ schedule, pp, m, v }) {
  if (schedule === "naive" || pp === 1) return 1;
  if (schedule === "gpipe") return m;
  if (schedule === "interleaved-1f1b" && v > 1) return Math.min(m, (pp * v + pp - 1) / v);
  return Math.min(m, schedule === "zb-h2" ? 2 * pp - 1 : pp);
}

// Bytes by kind on the rank that needs most. Buffers are held for a while: logits, a layer that is recomputed, a unit
// of ZeRO stage 3.
export function memory(s) {
  const state = modelState({ psi: rankParameters(s), d: s.dp, stage: s.zero, precision: s.precision });
  const layer = layerActivations(s);
  const layers = layersPerRank(s);
  const tokens = s.T * s.b * s.precision.parameters;
  const hidden = (tokens * s.h) / slices(s);
  const logits = 2 * hidden + (3 * tokens * s.vocab) / s.tp;
  const activations = inFlight(s) * layers * layer;
  // The logits are on the last rank. In a pipeline it has one microbatch in flight.
  const peak = s.pp === 1 ? activations + logits : Math.max(activations, layers * layer + logits);
  let buffers = peak - activations;
  if (s.recompute === "full") buffers += layerActivations({ ...s, recompute: "none" });
  if (s.zero === 3) buffers += 2 * s.precision.parameters * layerOnRank(s);
  if (s.zero >= 2) buffers += 2 * s.precision.gradients * layerOnRank(s);
  return {
    parameters: value(state.parameters),
    gradients: value(state.gradients),
    optimizer: value(state.optimizer),
    activations,
    buffers,
  };
}

// ---- what cannot be -------------------------------------------------------------------------------------------------

// Return why a layout is impossible, in words, or "".
export function impossible(s) {
  const divides = (a, b) => b % a === 0;
  if (!divides(s.heads, s.h)) return `hidden size ${s.h} is not divisible by ${s.heads} heads`;
  if (!divides(s.tp, s.heads)) return `${s.heads} heads cannot be divided evenly over tp = ${s.tp} ranks`;
  if (s.pp > s.layers) return `pp = ${s.pp} ranks, but only ${s.layers} layers: a rank would have none`;
  if (s.sequenceParallel && s.tp === 1) return "sequence parallelism divides the sequence over tp ranks, but tp = 1";
  if (s.pp > 1 && s.schedule === "interleaved-1f1b") {
    if (!divides(s.pp, s.m)) return `interleaved-1f1b sends microbatches in groups of pp: ${s.m}/${s.pp} is not whole`;
    if (s.pp * s.v > s.layers) return `pp * v = ${s.pp} * ${s.v} = ${s.pp * s.v} stages, but only ${s.layers} layers`;
  }
  if (s.pp > 1 && s.schedule === "zbv" && s.layers % (2 * s.pp)) {
    return `zbv has 2 pp = ${2 * s.pp} equal stages, which ${s.layers} layers do not give`;
  }
  if (s.pp > 1 && s.schedule === "zb-h1" && s.m < s.pp) return `zb-h1 needs m >= pp, but ${s.m} < ${s.pp}`;
  return "";
}
