// The colours of a timeline: those of visualize/style.py, chosen by the same rules.

// In style.py's order, which is that of the legend.
export const NAMED = {
  forward: "#0072B2", backward: "#E69F00", F: "#0072B2", B: "#E69F00", I: "#CC79A7", W: "#9FDBCA",
  optimizer: "#009E73", all_reduce: "#56B4E9", reduce_scatter: "#D55E00", all_gather: "#F0E442", broadcast: "#882255",
  all_to_all: "#332288", barrier: "#222222", send: "#3A3A3A", recv: "#999999", parameters: "#0072B2",
  gradients: "#E69F00", activations: "#F0E442", buffers: "#3A3A3A",
};
export const PHASES = {
  F: "F forward", B: "B backward", I: "I backward, input", W: "W backward, weights",
};
const GRAY = "#999999";
const OTHERS = [GRAY, "#56B4E9", "#D55E00", "#F0E442", "#CC79A7", "#009E73"]; // for names that have no colour
const EDGE = 55; // CIE L*: an edge of this lightness is seen on white and on black

// What a table has for a name; a file may name anything, "constructor" too.
const entry = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);

// A name in the legend.
export const legendOf = (name) => entry(PHASES, name) ?? name;

// A colour for each name: its own, or the next free one.
export function coloursOf(names) {
  const order = Object.keys(NAMED);
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const sorted = [...new Set(names)].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  const taken = sorted.map((name) => entry(NAMED, name));
  const free = OTHERS.filter((colour) => !taken.includes(colour));
  return Object.fromEntries(sorted.map((name) => [name, entry(NAMED, name) ?? free.shift() ?? GRAY]));
}

const partsOf = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
const written = (parts) =>
  `#${parts.map((part) => Math.round(part * 255).toString(16).padStart(2, "0")).join("")}`;

// CIE L*, a colour's lightness in greyscale: 0 (black) to 100 (white).
export function lightnessOf(colour) {
  const linear = partsOf(colour).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return y > 216 / 24389 ? 116 * y ** (1 / 3) - 16 : (y * 24389) / 27;
}

// The colour mixed with black or with white until it is as light as an edge.
export function edgeOf(colour) {
  const end = EDGE < lightnessOf(colour) ? 0 : 1;
  let [low, high] = [0, 1];
  let mixed = colour;
  for (let turn = 0; turn < 20; turn += 1) {
    const middle = (low + high) / 2;
    mixed = written(partsOf(colour).map((part) => part + (end - part) * middle));
    if (lightnessOf(mixed) > EDGE === (end === 0)) low = middle;
    else high = middle;
  }
  return mixed;
}

// The colour of text that can be read on a colour.
export const inkOn = (colour) => (lightnessOf(colour) < 55 ? "white" : "#222222");
