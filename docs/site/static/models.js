// The shapes of models and the parameters of their layers: minipar/plan/model.py in JavaScript.

const gpt = (layers, h, heads, vocab = 51200, positions = 2048) => ({
  layers, h, heads, vocab, positions, groups: heads, inner: 4 * h, gated: false, tied: true, biases: true,
  normBiases: true, experts: 0, topK: 1,
});
const llama = (layers, h, heads, groups, inner, vocab, experts = 0, topK = 1) => ({
  layers, h, heads, vocab, positions: 0, groups, inner, gated: true, tied: false, biases: false, normBiases: false,
  experts, topK,
});

export const MODELS = {
  "gpt2": gpt(12, 768, 12, 50257, 1024),
  "gpt2-xl": gpt(48, 1600, 25, 50257, 1024),
  "megatron-7.5b": gpt(36, 4096, 32),
  "megatron-39b": gpt(48, 8192, 64),
  "gpt3-175b": gpt(96, 12288, 96),
  "megatron-530b": gpt(105, 20480, 128),
  "megatron-1t": gpt(128, 25600, 160),
  "llama-7b": llama(32, 4096, 32, 32, 11008, 32000),
  "llama-3-8b": llama(32, 4096, 32, 8, 14336, 128256),
  "llama-2-70b": llama(80, 8192, 64, 8, 28672, 32000),
  "llama-3-405b": llama(126, 16384, 128, 8, 53248, 128256),
  "mixtral-8x7b": llama(32, 4096, 32, 8, 14336, 32000, 8, 2),
  "mixtral-8x22b": llama(56, 6144, 48, 8, 16384, 32000, 8, 2),
};

export const headSize = (s) => s.h / s.heads;
export const qkv = (s) => s.h + 2 * s.groups * headSize(s); // the columns of attention's first product
export const normParameters = (s) => s.h * (s.normBiases ? 2 : 1);
export const router = (s) => s.h * s.experts;
const expertParameters = (s) => s.h * (s.gated ? 3 : 2) * s.inner; // of one MLP

// Attention, the MLP or all experts with their router, two norms. GPT-2: 12 h h + 13 h.
export function layerParameters(s) {
  const biases = s.biases ? qkv(s) + s.h + (s.gated ? 2 : 1) * s.inner + s.h : 0;
  return s.h * (qkv(s) + s.h) + router(s) + (s.experts || 1) * expertParameters(s) + biases + 2 * normParameters(s);
}

export function parameters(s) {
  return (s.vocab * (s.tied ? 1 : 2) + s.positions) * s.h + s.layers * layerParameters(s) + normParameters(s);
}

// The parameters of one layer's experts on a rank: 1/ep of the experts, and 1/tp of each.
export const layerExperts = (s, tp, ep) => Math.floor(s.experts / ep) * Math.ceil(expertParameters(s) / tp);

// The parameters of one layer on a rank. Norms, biases of row-parallel layers and the router are whole on all ranks.
export function layerOnRank(s) {
  const whole = 2 * normParameters(s) + (s.biases ? 2 * s.h : 0) + router(s);
  const dense = layerParameters(s) - layerExperts(s, 1, 1) - whole;
  return Math.ceil(dense / s.tp) + whole + layerExperts(s, s.tp, s.ep);
}
