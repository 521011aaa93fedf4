// Bytes of model state on a rank at each ZeRO stage: minipar/parallel/memory.py in JavaScript.
// Rajbhandari et al. 2020 (arXiv 1910.02054), sections 3.1 and 5. tests/release/pages/test_explorers.py compares it
// with Python.

// Bytes for each element of parameters, gradients and optimizer state.
export const PRECISIONS = {
  mixed: { parameters: 2, gradients: 2, optimizer: 12 },
  "mixed, gradients in 32 bits": { parameters: 2, gradients: 4, optimizer: 12 },
  float32: { parameters: 4, gradients: 4, optimizer: 8 },
  float64: { parameters: 8, gradients: 8, optimizer: 16 },
};
export const STAGES = [0, 1, 2, 3];

// A fraction of two whole numbers. psi/d is often not whole, and bytes above 2^53 would be rounded as plain numbers.
export const fraction = (numerator, denominator) => [BigInt(numerator), BigInt(denominator)];
export const value = ([numerator, denominator]) => Number(numerator) / Number(denominator);

// The elements of each kind on a rank that owns 1/d of psi parameters, as {kind: [of psi, of psi/d]}. If microbatches
// accumulate, whole gradients are held beside the rank's part of their sum from stage 2 on.
export function elementsHeld(stage, accumulating) {
  const whole = [1, 0];
  const part = [0, 1];
  return {
    parameters: stage >= 3 ? part : whole,
    gradients: stage < 2 ? whole : accumulating ? [1, 1] : part,
    optimizer: stage >= 1 ? part : whole,
  };
}

// Bytes by kind, as fractions, on a rank that has psi parameters and owns own/d of them.
export function modelState({ psi, d, own = psi, stage, precision, accumulating }) {
  const held = Object.entries(elementsHeld(stage, accumulating));
  return Object.fromEntries(held.map(([kind, [whole, part]]) => {
    const numerator = BigInt(precision[kind])
      * (BigInt(whole) * BigInt(psi) * BigInt(d) + BigInt(part) * BigInt(own));
    return [kind, fraction(numerator, d)];
  }));
}

// The formula of all kinds together, such as "2 Ψ + 14 Ψ/d".
export function formula(stage, precision, accumulating) {
  let [whole, part] = [0, 0];
  for (const [kind, [w, p]] of Object.entries(elementsHeld(stage, accumulating))) {
    whole += w * precision[kind];
    part += p * precision[kind];
  }
  return [whole && `${whole} Ψ`, part && `${part} Ψ/d`].filter(Boolean).join(" + ");
}
