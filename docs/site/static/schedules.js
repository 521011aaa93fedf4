// Pipeline schedules in JavaScript: minipar/parallel/pipeline/schedules.py.
// tests/release/pages/test_explorers.py compares every list, start, end, bubble and peak with Python's.

import { act, measure, paired } from "./actions.js";

export const SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"];

const V_SHAPED = ["zbv", "dualpipev"];

const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, k) => start + k);
const perRank = (p, list) => range(0, p).map(list);

const naive = (p, m) => perRank(p, (r) => range(0, m).flatMap((i) => [act(r, "F", i), act(r, "B", i)]));

const gpipe = (p, m) => perRank(p, (r) => ["F", "B"].flatMap((kind) => range(0, m).map((i) => act(r, kind, i))));

function oneFOneB(p, m) {
  return perRank(p, (r) => {
    const ahead = Math.min(p - 1 - r, m);
    return [
      ...range(0, ahead).map((i) => act(r, "F", i)), // warmup: one forward for each rank after this one
      ...range(0, m - ahead).flatMap((i) => [act(r, "F", ahead + i), act(r, "B", i)]), // steady state
      ...range(m - ahead, m).map((i) => act(r, "B", i)), // cooldown
    ];
  });
}

// 1F1B over v stages per rank: rank r has the stages r, p+r, 2p+r, ... Microbatches pass in groups of p.
function interleaved(p, m, v) {
  if (m % p) throw new Error(`interleaved-1f1b sends microbatches in groups of p: m/p = ${m}/${p} is not whole`);
  const action = (r, kind, k) => {
    const group = Math.floor(k / (p * v));
    const turn = Math.floor((k % (p * v)) / p); // which of the rank's stages; backwards begin with the last
    return act((kind === "F" ? turn : v - 1 - turn) * p + r, kind, group * p + (k % p));
  };
  return perRank(p, (r) => {
    const ahead = Math.min(2 * (p - r - 1) + (v - 1) * p, m * v);
    return [
      ...range(0, ahead).map((k) => action(r, "F", k)),
      ...range(0, m * v - ahead).flatMap((k) => [action(r, "F", ahead + k), action(r, "B", k)]),
      ...range(m * v - ahead, m * v).map((k) => action(r, "B", k)),
    ];
  });
}

// ZB-H1 (depth 1) and ZB-H2 (depth 2): depth (p-1-r) forwards first, and each W depth r microbatches after its I.
function zeroBubble(p, m, depth) {
  return perRank(p, (r) => {
    const ahead = Math.min(depth * (p - 1 - r), m);
    const delay = depth * r;
    const list = range(0, ahead).map((i) => act(r, "F", i));
    for (const i of range(0, m)) {
      if (ahead + i < m) list.push(act(r, "F", ahead + i));
      list.push(act(r, "I", i));
      if (i >= delay) list.push(act(r, "W", i - delay));
    }
    return [...list, ...range(Math.max(0, m - delay), m).map((i) => act(r, "W", i))];
  });
}

// ZB-V: rank r has stage r on the way down (small letters) and stage 2p-1-r on the way up (capitals).
function zbv(p, m) {
  const n = Math.max(m, 2 * p - 1);
  return perRank(p, (r) => {
    const order = [
      "f".repeat(2 * (p - r) - 1), // until microbatch 0 has been down to the last rank and is back here
      "Ff".repeat(r), // until it has been up to rank 0, where its backward starts, and its gradient is here
      "FIW".repeat(p - r), // until that gradient has been down to the last rank and is back
      "fiwFIW".repeat(Math.max(0, n - (2 * p - 1 - r))), // steady state
      "iwFIW".repeat(p - 1 - r), // the same when all forwards down are done
      "iI".repeat(r) + "iw".repeat(p - r) + "W".repeat(r) + "w".repeat(r), // cooldown
    ].join("");
    const count = {}; // the k-th occurrence of a letter is for microbatch k; those from m on are left out
    const list = [];
    for (const letter of order) {
      const k = count[letter] ?? 0;
      const kind = letter.toUpperCase();
      if (k < m) list.push(act(letter === kind ? 2 * p - 1 - r : r, kind, k));
      count[letter] = k + 1;
    }
    return list;
  });
}

// DualPipeV: the V of zbv, and one stage's forwards overlap the other's backwards. The eight steps are DeepSeek's.
function dualPipeV(p, m) {
  if (m < 2 * p) throw new Error(`dualpipev needs m >= 2 pp, but ${m} < ${2 * p}`);
  return perRank(p, (r) => {
    const [down, up] = [r, 2 * p - 1 - r];
    const after = p - 1 - r;
    const count = {}; // the k-th action of a stage and kind is for microbatch k; those from m on are left out
    const list = [];
    const next = (stage, kind) => {
      const k = count[`${stage}${kind}`] ?? 0;
      count[`${stage}${kind}`] = k + 1;
      return act(stage, kind, k);
    };
    const backwardOf = (stage) => { // a B counts as its I and its W
      next(stage, "W");
      return act(stage, "B", next(stage, "I").microbatch);
    };
    const add = (action) => { if (action.microbatch < m) list.push(action); };
    const pair = (forward, backward) => {
      const half = next(forward, "F");
      add(paired(half, backwardOf(backward)));
    };
    for (let i = 0; i < 2 * after; i += 1) add(next(down, "F"));
    for (let i = 0; i < r + 1; i += 1) for (const stage of [down, up]) add(next(stage, "F"));
    for (let i = 0; i < after; i += 1) for (const kind of ["I", "W", "F"]) add(next(up, kind));
    for (let i = 0; i < m - 2 * p + r + 1; i += 1) {
      if (i === 0 && r === p - 1) {
        add(next(down, "F"));
        add(backwardOf(up));
      } else {
        pair(down, up);
      }
      pair(up, down);
    }
    for (let i = 0; i < after; i += 1) {
      add(backwardOf(up));
      pair(up, down);
    }
    const late = []; // the stages whose W is still to come, in the order of their I
    for (let i = 0; i < 2 * (r + 1); i += 1) {
      const stage = i % 2 ? down : up;
      if (i < r + 1) {
        add(backwardOf(stage));
      } else {
        add(next(stage, "I"));
        late.push(stage);
      }
    }
    for (let i = 0; i < after; i += 1) {
      add(next(late.shift(), "W"));
      add(next(down, "I"));
      late.push(down);
    }
    for (const stage of late) add(next(stage, "W"));
    return list;
  });
}

// The number of stages that each rank has; v is the user's choice for interleaved-1f1b alone.
export const stagesPerRank = (name, v) => (name === "interleaved-1f1b" ? v : V_SHAPED.includes(name) ? 2 : 1);

// The list of actions of each rank.
export function make(name, p, m, v) {
  if (!SCHEDULES.includes(name)) throw new Error(`schedule ${name}: choose from ${SCHEDULES.join(", ")}`);
  if (!(p >= 1 && m >= 1 && v >= 1)) throw new Error(`p = ${p}, m = ${m}, v = ${v}: each is at least 1`);
  switch (name) {
    case "naive": return naive(p, m);
    case "gpipe": return gpipe(p, m);
    case "1f1b": return oneFOneB(p, m);
    case "interleaved-1f1b": return interleaved(p, m, v);
    case "zb-h1": return zeroBubble(p, m, 1);
    case "zb-h2": return zeroBubble(p, m, 2);
    case "zbv": return zbv(p, m);
    default: return dualPipeV(p, m);
  }
}

// Everything that the page shows. F, I, W are the times of all layers of a rank; each of its v stages takes 1/v.
export function explore({ name, p, m, v, F, I, W, comm }) {
  const lists = make(name, p, m, v);
  for (const time of [F, I, W, comm]) if (!(time >= 0)) throw new Error(`a time of ${time}: an action takes 0 or more`);
  const own = stagesPerRank(name, v);
  return { ...measure(lists, { F: F / own, I: I / own, W: W / own, comm }, name), stages: own };
}
