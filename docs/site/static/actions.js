// A schedule as lists of actions, one list for each rank, and the time it takes, in JavaScript:
// minipar/parallel/pipeline/actions.py. An action is {stage, kind, microbatch}; a pair of F and B has both in `pair`.
// tests/release/pages/test_explorers.py and tests/release/pages/test_editor.py compare every start, end, bubble,
// peak and message of an error.

export const COMPUTE = ["F", "B", "I", "W"];
export const MESSAGES = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"];
export const PAIR = "OVERLAP_F_B";

export const act = (stage, kind, microbatch) => ({ stage, kind, microbatch });
export const paired = (forward, backward) => ({ ...forward, kind: PAIR, pair: [forward, backward] });
export const computes = ({ kind }) => COMPUTE.includes(kind) || kind === PAIR;

// The F and the B of a pair; any other action is its only half.
export const halvesOf = (action) => action.pair ?? [action];

export function actionText(action) {
  if (action.pair) return `(${action.pair.map(actionText).join(";")})${action.kind}`;
  return `${action.stage}${action.kind}${action.microbatch}`;
}

const largest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);

// What follows from the lists: all halves with their ranks, the rank of each stage, the number of stages and of
// microbatches, and the kind, B or I, that computes the gradient of a stage's input.
export function survey(lists) {
  const all = lists.flatMap((list, rank) => list.flatMap(halvesOf).map((action) => ({ action, rank })));
  const computing = all.filter(({ action }) => computes(action));
  return {
    all,
    home: new Map([...all, ...computing].map(({ action, rank }) => [action.stage, rank])),
    stages: 1 + largest(all.map(({ action }) => action.stage)),
    microbatches: 1 + largest(all.map(({ action }) => action.microbatch)),
    backwards: new Map(computing.filter(({ action: { kind } }) => kind === "B" || kind === "I")
      .map(({ action: { stage, kind, microbatch } }) => [`${stage}:${microbatch}`, kind])),
  };
}

// The computations whose results an action uses. The gradient from the next stage comes of its B, or of its I.
export function needs(action, known) {
  if (action.pair) return action.pair.flatMap((half) => needs(half, known));
  const { stage, kind, microbatch } = action;
  if (kind === "F") return stage > 0 ? [act(stage - 1, "F", microbatch)] : [];
  if (kind === "W") return [act(stage, "I", microbatch)];
  const own = act(stage, "F", microbatch);
  if (stage === known.stages - 1) return [own];
  return [own, act(stage + 1, known.backwards.get(`${stage + 1}:${microbatch}`) ?? "B", microbatch)];
}

// Run the lists: an action starts when its rank is free and what it needs has arrived, `comm` later if from another
// rank. Return {action, start, end} for each action of each rank. `times` are those of one stage.
export function simulate(lists, times, name) {
  const duration = { F: times.F, I: times.I, W: times.W, B: times.I + times.W };
  const time = (action) => halvesOf(action).reduce((sum, { kind }) => sum + duration[kind], 0);
  const known = survey(lists);
  const own = lists.map((list) => list.filter(computes));
  const rows = own.map(() => []);
  const ends = new Map();
  const waiting = new Map(); // the ranks that wait for a result
  const missing = (action) => needs(action, known).map(actionText).filter((need) => !ends.has(need));
  const ready = own.map((_, rank) => rank);
  while (ready.length) {
    const rank = ready.shift();
    const row = rows[rank];
    while (row.length < own[rank].length) {
      const action = own[rank][row.length];
      const [first] = missing(action);
      if (first !== undefined) {
        waiting.set(first, [...(waiting.get(first) ?? []), rank]);
        break;
      }
      const arrivals = needs(action, known).map((need) =>
        ends.get(actionText(need)) + (known.home.get(need.stage) === rank ? 0 : times.comm));
      const start = Math.max(row.length ? row[row.length - 1].end : 0, ...arrivals);
      row.push({ action, start, end: start + time(action) });
      for (const half of halvesOf(action).map(actionText)) {
        ends.set(half, start + time(action));
        ready.push(...(waiting.get(half) ?? []));
        waiting.delete(half);
      }
    }
  }
  const stuck = own.flatMap((list, rank) => {
    const next = list[rows[rank].length];
    return next ? [`rank ${rank} before ${actionText(next)}, which needs ${missing(next).join(", ")}`] : [];
  });
  if (stuck.length) throw new Error(`schedule ${name} never ends: ${stuck.join("; ")}`);
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

// The most activations alive at once, by the order of a rank's list: made by F, and freed by B or I.
export function peakLive(list, made = ["F"], freed = ["B", "I"]) {
  let live = 0;
  let peak = 0;
  for (const { kind } of list.flatMap(halvesOf)) {
    if (made.includes(kind)) live += 1;
    if (freed.includes(kind)) live -= 1;
    peak = Math.max(peak, live);
  }
  return peak;
}

// The times of a schedule, its bubble, and what the ranks keep, in activations of one stage.
export function measure(lists, times, name) {
  const rows = simulate(lists, times, name);
  const total = largest(rows.flat().map((slot) => slot.end));
  const busy = rows.flat().reduce((sum, slot) => sum + (slot.end - slot.start), 0);
  return {
    rows,
    total,
    bubble: total ? (total * lists.length - busy) / (total * lists.length) : 0, // idle / total
    peaks: lists.map((list) => peakLive(list)),
    live: rows.map(liveActivations),
  };
}
