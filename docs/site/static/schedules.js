// Pipeline schedules and the time they take, in JavaScript: minipar/parallel/pipeline/schedules.py, and simulate of
// actions.py. A pair of F and B that overlap is an action with `pair`.
// tests/test_explorers.py compares every list, start, end, bubble and peak with Python's.

export const SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"];

const V_SHAPED = ["zbv", "dualpipev"];

const act = (stage, kind, microbatch) => ({ stage, kind, microbatch });
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
      const halves = [next(forward, "F"), backwardOf(backward)];
      add({ ...halves[0], kind: "OVERLAP_F_B", pair: halves });
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

// The F and the B of a pair; any other action is its only half.
export const halvesOf = (action) => action.pair ?? [action];

export function actionText(action) {
  if (action.pair) return `(${action.pair.map(actionText).join(";")})${action.kind}`;
  return `${action.stage}${action.kind}${action.microbatch}`;
}

// The computations whose results an action uses. The gradient from the next stage comes of its B, or of its I:
// backwards has the kind of each stage and microbatch.
function needs(action, stages, backwards) {
  if (action.pair) return action.pair.flatMap((half) => needs(half, stages, backwards));
  const { stage, kind, microbatch } = action;
  if (kind === "F") return stage > 0 ? [act(stage - 1, "F", microbatch)] : [];
  if (kind === "W") return [act(stage, "I", microbatch)];
  const own = act(stage, "F", microbatch);
  if (stage === stages - 1) return [own];
  return [own, act(stage + 1, backwards.get(`${stage + 1}:${microbatch}`) ?? "B", microbatch)];
}

// Run the lists: an action starts when its rank is free and what it needs has arrived, `comm` later if from another
// rank. Returns {action, start, end} for each action of each rank. `times` are those of one stage.
export function simulate(lists, times) {
  const duration = { F: times.F, I: times.I, W: times.W, B: times.I + times.W };
  const halves = lists.map((list) => list.flatMap(halvesOf));
  const home = new Map(halves.flatMap((list, rank) => list.map((half) => [half.stage, rank])));
  const backwards = new Map(halves.flat().filter(({ kind }) => kind === "B" || kind === "I")
    .map(({ stage, kind, microbatch }) => [`${stage}:${microbatch}`, kind]));
  const time = (action) => halvesOf(action).reduce((sum, { kind }) => sum + duration[kind], 0);
  const ends = new Map();
  const rows = lists.map(() => []);
  for (let progress = true; progress; ) {
    progress = false;
    lists.forEach((list, rank) => {
      const row = rows[rank];
      while (row.length < list.length) {
        const action = list[row.length];
        const needed = needs(action, home.size, backwards);
        if (!needed.every((need) => ends.has(actionText(need)))) break;
        const arrivals = needed.map((n) => ends.get(actionText(n)) + (home.get(n.stage) === rank ? 0 : times.comm));
        const start = Math.max(row.length ? row[row.length - 1].end : 0, ...arrivals);
        const end = start + time(action);
        for (const half of halvesOf(action)) ends.set(actionText(half), end);
        row.push({ action, start, end });
        progress = true;
      }
    });
  }
  if (rows.some((row, rank) => row.length < lists[rank].length)) throw new Error("the ranks wait for one another");
  return rows;
}

// [time, activations alive from then on] of one rank: alive from the start of F to the end of B or I.
export function liveActivations(row) {
  const changes = row.flatMap(({ action, start, end }) => halvesOf(action).flatMap(({ kind }) =>
    kind === "F" ? [[start, 1]] : kind === "W" ? [] : [[end, -1]]));
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]); // at the same time, what is freed counts first
  const steps = [[row[0].start, 0]];
  let live = 0;
  for (const [time, change] of changes) {
    live += change;
    if (steps[steps.length - 1][0] === time) steps.pop();
    steps.push([time, live]);
  }
  return steps;
}

// The most forwards of one stage without their backward, by the order of a rank's list.
export function peakActivations(list) {
  let live = 0;
  let peak = 0;
  for (const { kind } of list.flatMap(halvesOf)) {
    live += kind === "F" ? 1 : kind === "W" ? 0 : -1;
    peak = Math.max(peak, live);
  }
  return peak;
}

// Everything that the page shows. F, I, W are the times of all layers of a rank; each of its v stages takes 1/v.
export function explore({ name, p, m, v, F, I, W, comm }) {
  const lists = make(name, p, m, v);
  for (const time of [F, I, W, comm]) if (!(time >= 0)) throw new Error(`a time of ${time}: an action takes 0 or more`);
  const own = stagesPerRank(name, v);
  const rows = simulate(lists, { F: F / own, I: I / own, W: W / own, comm });
  const total = Math.max(...rows.flatMap((row) => row.map((slot) => slot.end)));
  const busy = rows.flat().reduce((sum, slot) => sum + (slot.end - slot.start), 0);
  return {
    rows,
    total,
    bubble: total ? (total * p - busy) / (total * p) : 0, // idle / total
    peaks: lists.map(peakActivations), // in activations of one stage
    live: rows.map(liveActivations),
    stages: own,
  };
}
