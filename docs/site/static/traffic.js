// Bytes that a rank of a layout sends in a step, by axis, and holds: minipar/plan/rank_bytes.py in JavaScript, for a
// framework with Megatron-LM's habits. tests/release/pages/test_explorers.py compares it with Python.
//
// A setting s has a model (models.js), T tokens in a sequence, dp, tp, pp, cp, ep, context (ring, all-gather, ulysses),
// a schedule with v stages per rank, b samples in a microbatch, m microbatches, zero, recompute, attention, precision.

import { fraction, modelState, value } from "./memory.js";
import { headSize, layerExperts, layerOnRank, normParameters, qkv, router } from "./models.js";

// ---- parameters of a rank -------------------------------------------------------------------------------------------

const layersPerRank = ({ layers, pp }) => Math.ceil(layers / pp);
const slices = ({ tp, sequenceParallel }) => (sequenceParallel ? tp : 1);
const stages = ({ schedule, v }) => (schedule === "zbv" ? 2 : schedule === "interleaved-1f1b" ? v : 1);
const tokensOnRank = ({ b, T, cp }) => b * Math.floor(T / cp);
const keyColumns = (s) => Math.max(1, Math.floor(s.groups / s.tp)) * headSize(s); // of a tp rank's keys
const activeInner = (s) => s.topK * s.inner;

// The first pipeline rank has most: the embeddings and its layers; without a pipeline the last norm and the head too.
export function rankParameters(s) {
  const rows = Math.ceil((s.vocab * s.h) / s.tp);
  const end = s.pp === 1 ? normParameters(s) + (s.tied ? 0 : rows) : 0;
  return rows + s.positions * s.h + layersPerRank(s) * layerOnRank(s) + end;
}

// Those of them that not all ranks of dp x cp have.
export const rankExperts = (s) => (s.ep > 1 ? layersPerRank(s) * layerExperts(s, s.tp, s.ep) : 0);

// ---- traffic --------------------------------------------------------------------------------------------------------

// Elements that context parallelism moves in each pass of a layer, and the gradients that it sums, of one microbatch.
function contextElements(s) {
  const [c, u, h, keys] = [s.cp, tokensOnRank(s), Math.floor(s.h / s.tp), keyColumns(s)];
  if (s.context === "ulysses" || c === 1) return [Math.floor((2 * (h + keys) * u * (c - 1)) / c), 0];
  const hops = s.context === "ring" ? c : c - 1;
  return [2 * (c - 1) * u * keys, 2 * hops * u * keys];
}

// Bytes that a rank sends in a step over each axis, as fractions. All but dp: a rank in the middle of the pipeline; dp:
// the first rank.
export function volume(s) {
  const [t, m, layers, ep] = [s.tp, s.m, layersPerRank(s), s.ep].map(BigInt);
  const [width, full] = [s.precision.parameters, s.recompute === "full"];
  const hidden = BigInt(tokensOnRank(s)) * BigInt(s.h * width);
  // Per layer: two sums forward and two backward, 2 (t-1)/t each; recomputation repeats the forward ones.
  const tp = (full ? 12n : 8n) * hidden * (t - 1n) * m * layers;
  // Each tp rank sends its 1/t of an activation, forward and back.
  const pp = s.pp > 1 ? 2n * hidden * m * BigInt(stages(s)) : 0n;
  // From stage 2 on gradients are reduced, and in stage 3 parameters gathered, for every microbatch.
  const gathers = [0, 1, 1, 2 * s.m][s.zero];
  const reductions = [2, 1, s.m, s.m][s.zero];
  const bytes = BigInt(gathers * width + reductions * s.precision.gradients);
  const [psi, experts, shards] = [rankParameters(s), rankExperts(s), s.dp * s.cp].map(BigInt);
  const dp = bytes * ((psi - experts) * (shards - 1n) + experts * (shards - ep));
  const [moved, summed] = contextElements(s).map(BigInt);
  const cp = (moved * (full ? 3n : 2n) + summed) * BigInt(width) * m * layers;
  // Rows to their experts and results back, each way, and before each dispatch the counts of 8 bytes.
  const rows = ep > 1n ? BigInt(s.topK) * hidden : 0n;
  const counts = ep > 1n ? 8n * BigInt(s.experts) : 0n;
  const forwards = full ? 2n : 1n;
  const toExperts = (2n * rows * (forwards + 1n) + counts * forwards) * (ep - 1n) * m * layers;
  return {
    tp: fraction(tp, t),
    pp: fraction(pp, t),
    dp: fraction(dp, shards),
    cp: fraction(cp, 1),
    ep: fraction(toExperts, ep),
  };
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// Bytes that a layer keeps of one microbatch: s b h (10 + 24/t + 5as/(ht)), Korthikanti et al. 2022 (arXiv 2205.05198).
export function layerActivations(s) {
  const tokens = tokensOnRank(s) * s.precision.parameters;
  if (s.recompute === "full") return (tokens * s.h) / slices(s);
  const stored = s.recompute === "none" && s.attention === "stored" && (s.cp === 1 || s.context === "ulysses");
  const core = stored ? 2.5 * s.heads * s.T : 0;
  const split = qkv(s) + s.h + (s.gated ? 4 : 2) * activeInner(s);
  const whole = s.experts ? 2 * s.topK * s.h + 4 * s.experts : 0;
  return tokens * ((5 * s.h) / slices(s) + whole + (split + core) / s.tp);
}

// The microbatches whose activations the first rank keeps.
export function inFlight({ schedule, pp, m, v }) {
  if (schedule === "naive" || pp === 1) return 1;
  if (schedule === "gpipe") return m;
  if (schedule === "interleaved-1f1b") return Math.min(m, (pp * v + pp - 1) / v);
  return Math.min(m, schedule === "zb-h2" ? 2 * pp - 1 : pp);
}

// The microbatches that the last rank keeps next to the logits: (v - 1) p + 1 chunks of v.
function inFlightLast({ schedule, pp, m, v }) {
  if (schedule !== "interleaved-1f1b") return 1;
  return Math.min(m, (pp * v - (pp - 1)) / v);
}

// Elements that attention over cp > 1 ranks holds for a moment in backward.
function contextBuffer(s) {
  const [u, keys] = [tokensOnRank(s), keyColumns(s)];
  if (s.context === "ulysses") return 2 * u * (Math.floor(s.h / s.tp) + 2 * keys);
  return (s.context === "ring" ? 8 : 4 * s.cp) * u * keys;
}

// Bytes that exist for a moment, but for the logits: a layer that is recomputed, a unit of ZeRO stage 3, the keys and
// values of other ranks. They are added up in Python's order, since sums of thirds are rounded.
function momentBuffers(s) {
  const tokens = tokensOnRank(s) * s.precision.parameters;
  let buffers = 0;
  if (s.recompute === "full") buffers += layerActivations({ ...s, recompute: "none" });
  if (s.zero === 3) buffers += 2 * s.precision.parameters * layerOnRank(s);
  if (s.zero >= 2) buffers += 2 * s.precision.gradients * layerOnRank(s);
  if (s.cp > 1) { // by then backward has freed the activations of the layer's MLP
    const freed = (tokens * (s.gated ? 4 : 2) * activeInner(s)) / s.tp;
    buffers += Math.max(0, s.precision.parameters * contextBuffer(s) - freed);
  }
  return buffers;
}

// Bytes by kind on the rank that needs most. Buffers are held for a while.
export function memory(s) {
  const [psi, experts, shards] = [rankParameters(s), rankExperts(s), s.dp * s.cp];
  const own = psi - experts + experts * s.ep; // over dp x cp: experts have ep times fewer ranks
  const state = modelState({ psi, d: shards, own, stage: s.zero, precision: s.precision });
  const layers = layersPerRank(s) * layerActivations(s);
  const tokens = tokensOnRank(s) * s.precision.parameters;
  const hidden = (tokens * s.h) / slices(s);
  const logits = 2 * hidden + (3 * tokens * s.vocab) / s.tp;
  const activations = inFlight(s) * layers;
  // The logits are on the last rank, which has fewer microbatches in flight.
  const peak = s.pp === 1 ? activations + logits : Math.max(activations, inFlightLast(s) * layers + logits);
  return {
    parameters: value(state.parameters),
    gradients: value(state.gradients),
    optimizer: value(state.optimizer),
    activations,
    buffers: peak - activations + momentBuffers(s),
  };
}

// ---- what cannot be -------------------------------------------------------------------------------------------------

const divides = (a, b) => b % a === 0;

// Return why a layout is impossible, in words, or "".
export function impossible(s) {
  if (!divides(s.heads, s.h)) return `hidden size ${s.h} is not divisible by ${s.heads} heads`;
  if (!divides(s.groups, s.heads)) return `${s.heads} heads are not divisible by ${s.groups} heads of keys and values`;
  if (!divides(s.tp, s.heads)) return `${s.heads} heads cannot be divided evenly over tp = ${s.tp} ranks`;
  if (!divides(s.tp, s.groups) && !divides(s.groups, s.tp)) {
    return `tp = ${s.tp} does not divide ${s.groups} heads of keys and values, nor is it a multiple of them`;
  }
  if (s.sequenceParallel && s.tp === 1) return "sequence parallelism divides the sequence over tp ranks, but tp = 1";
  return impossibleContext(s) || impossibleExperts(s) || impossiblePipeline(s);
}

function impossibleContext(s) {
  if (s.cp > 1 && !divides(2 * s.cp, s.T)) return `${s.T} tokens cannot be cut into 2 cp = ${2 * s.cp} equal chunks`;
  if (s.cp === 1 || s.context !== "ulysses") return "";
  const heads = [s.heads / s.tp, Math.max(1, Math.floor(s.groups / s.tp))];
  const uneven = heads.find((count) => !divides(s.cp, count));
  return uneven === undefined ? "" : `ulysses cuts each tp rank's ${uneven} heads over cp = ${s.cp} ranks`;
}

function impossibleExperts(s) {
  if (s.ep > 1 && !s.experts) return `ep = ${s.ep} divides the experts of a layer, but this model has none`;
  if (s.ep > 1 && !divides(s.ep, s.experts)) return `${s.experts} experts cannot be divided evenly over ep = ${s.ep}`;
  if (!divides(s.ep, s.dp * s.cp)) return `ep = ${s.ep} does not divide the dp * cp = ${s.dp * s.cp} ranks`;
  return "";
}

function impossiblePipeline(s) {
  if (s.pp > s.layers) return `pp = ${s.pp} ranks, but only ${s.layers} layers: a rank would have none`;
  if (s.pp === 1) return "";
  if (s.schedule === "interleaved-1f1b") {
    if (!divides(s.pp, s.m)) return `interleaved-1f1b sends microbatches in groups of pp: ${s.m}/${s.pp} is not whole`;
    if (s.pp * s.v > s.layers) return `pp * v = ${s.pp} * ${s.v} = ${s.pp * s.v} stages, but only ${s.layers} layers`;
  }
  if (s.schedule === "zbv" && !divides(2 * s.pp, s.layers)) {
    return `zbv has 2 pp = ${2 * s.pp} equal stages, which ${s.layers} layers do not give`;
  }
  if (s.schedule === "zb-h1" && s.m < s.pp) return `zb-h1 needs m >= pp, but ${s.m} < ${s.pp}`;
  return "";
}
