// The graders of the exercises on schedules, in JavaScript: e10, e11 and e26 of chapters/exercises/graders, for one p
// and one m. tests/release/pages/test_editor.py compares their words.

import { halvesOf, peakLive, simulate, survey } from "./actions.js";
import { check } from "./check.js";
import { parseAction, quoted } from "./csv.js";

const pythonText = (word) => quoted(Array.from(word));
const pythonList = (words) => `[${words.map(pythonText).join(", ")}]`;
const microbatches = (m) => Array.from({ length: m }, (_, i) => i);

function require(condition, hint) {
  if (!condition) throw new Error(hint);
}

// Run a function; the words of its error begin with `where`.
function within(where, compute) {
  try {
    return compute();
  } catch (error) {
    throw new Error(where + error.message);
  }
}

const endOf = (rows) => Math.max(...rows.flat().map((slot) => slot.end));

// Exercises 10 and 11 have one stage for each rank, and write no stage: "F0" on rank 2 is 2F0.
function named(rows) {
  return rows.map((row, rank) => row.map((cell) => {
    const rest = cell.startsWith(String(rank)) ? cell.slice(String(rank).length) : cell;
    return /^[FBIW]/.test(rest) ? rest : cell;
  }));
}

// Throw unless each list has every action once, those of a microbatch in the order of `kinds`.
function checkActions(lists, p, m, kinds) {
  require(lists.length === p, `p = ${p}, m = ${m}: expected a list of ${p} lists`);
  const wanted = kinds.flatMap((kind) => microbatches(m).map((i) => `${kind}${i}`)).sort();
  lists.forEach((actions, rank) => {
    const where = `p = ${p}, m = ${m}, rank ${rank}`;
    const unknown = actions.filter((action) => !wanted.includes(action));
    require(!unknown.length,
      `${where}: ${pythonList(unknown.slice(0, 1))} is no action; with m = ${m} they are ${pythonList(wanted)}`);
    const missing = wanted.filter((action) => !actions.includes(action));
    require(!missing.length, `${where}: it never runs ${missing.join(", ")}`);
    const twice = actions.filter((action, place) => actions.indexOf(action) !== actions.lastIndexOf(action));
    require(!twice.length, `${where}: it runs ${pythonList(twice.slice(0, 1))} more than once`);
    for (const i of microbatches(m)) {
      for (let place = 1; place < kinds.length; place += 1) {
        const [first, second] = [`${kinds[place - 1]}${i}`, `${kinds[place]}${i}`];
        require(actions.indexOf(first) < actions.indexOf(second),
          `${where}: it runs ${second} before ${first}, which makes what ${second} needs`);
      }
    }
  });
}

// Return the lists of actions and their total time, with F = I = W = 1 and B = 2.
function timed(lists, p, m, kinds) {
  checkActions(lists, p, m, kinds);
  const parsed = lists.map((actions, rank) => actions.map((action) => parseAction(`${rank}${action}`, "")));
  return within(`p = ${p}, m = ${m}: `, () => {
    const rows = simulate(parsed, { F: 1, I: 1, W: 1, comm: 0 }, "yours");
    check(parsed, "yours");
    return { parsed, total: endOf(rows) };
  });
}

// ---- exercise 10: 1F1B as lists -------------------------------------------------------------------------------------

export function grade10(rows, p, m) {
  const lists = named(rows);
  checkActions(lists, p, m, ["F", "B"]);
  const begun = lists.map((actions) => actions.findIndex((action) => action[0] === "B")).join();
  const ranks = Array.from({ length: p }, (_, rank) => rank);
  const isRight = begun === ranks.map((rank) => Math.min(m, p - rank)).join();
  require(isRight || begun !== ranks.map((rank) => Math.min(m, rank + 1)).join(),
    `p = ${p}, m = ${m}: the warm-up is mirrored: it has r forwards on rank r, and p - r - 1 are right; `
    + "rank 0 waits longest for its first backward");
  const { parsed, total } = timed(lists, p, m, ["F", "B"]);
  parsed.forEach((list, rank) => {
    const alive = peakLive(list);
    const most = Math.min(m, p - rank);
    let extra = "";
    if (alive === most + 1) extra = "; the warm-up of rank r has p - r - 1 forwards, before the first pair";
    if (alive === m && m > most + 1) {
      extra = "; these are all microbatches, as in GPipe: begin backward as soon as one has arrived";
    }
    const where = `p = ${p}, m = ${m}`;
    require(alive <= most, `${where}: ${alive} microbatches are alive on rank ${rank}, at most ${most}${extra}`);
  });
  const shortest = 3 * (m + p - 1);
  const orders = lists.map((actions) => actions.filter((action) => action[0] === "B").join());
  const inOrder = orders.every((order) => order === microbatches(m).map((i) => `B${i}`).join());
  const reason = inOrder
    ? "the warm-up differs from rank to rank, p - r - 1 forwards on rank r: with fewer, the last rank waits for work"
    : "the backwards of a rank run in the order of the microbatches, B0, B1, B2, ...";
  require(total === shortest,
    `p = ${p}, m = ${m}: it takes ${total} (T_F = 1, T_B = 2), 1F1B takes ${shortest}; ${reason}`);
  return `the time of 1F1B, ${total}, and no more alive than its min(m, p - r)`;
}

// ---- exercise 11: faster than 1F1B, in its memory -------------------------------------------------------------------

export function grade11(rows, p, m) {
  const lists = named(rows);
  lists.forEach((actions, rank) => {
    for (const i of microbatches(m)) {
      const [forward, input, weights] = ["F", "I", "W"].map((kind) => actions.lastIndexOf(`${kind}${i}`));
      require([forward, input, weights].includes(-1) || weights > input,
        `p = ${p}, m = ${m}: rank ${rank} runs W${i} before I${i}, which makes what it needs`);
    }
  });
  const { parsed, total } = timed(lists, p, m, ["F", "I", "W"]);
  const limit = Math.min(m, p);
  parsed.forEach((list, rank) => {
    const alive = peakLive(list, ["F"], ["W"]);
    require(alive <= limit, `p = ${p}, m = ${m}: ${alive} microbatches are alive on rank ${rank} from F to W, at most `
      + `${limit}: run a waiting W before the forward that would be one too many`);
  });
  const bound = 3 * m + 2 * (p - 1);
  const follows = (actions, i) => actions.indexOf(`W${i}`) === actions.indexOf(`I${i}`) + 1;
  const arePairs = lists.every((actions) => microbatches(m).every((i) => follows(actions, i)));
  const reason = arePairs ? "every W stands right behind its I; move some to where the rank waits"
    : "let the I that others wait for go first, and a W run where a rank would wait";
  require(total < bound, `p = ${p}, m = ${m}: it takes ${total}, and must take less than ${bound}: ${reason}`);
  return `time ${total}, less than ${bound}, in the memory of 1F1B; ZB-H1 takes ${3 * m + p - 1}`;
}

// ---- exercise 26: a score of time and memory ------------------------------------------------------------------------

export const ROWS = {
  naive: [384, 1], gpipe: [132, 8], "1f1b": [132, 4], "interleaved-1f1b": [114, 5.5], "zb-h1": [114, 4],
  "zb-h2": [108, 7], zbv: [103.5, 4], dualpipev: [111, 4.5], "1f1b-2-alive": [204, 2], "ifw-2-alive": [174, 2],
  "1f1b-3-alive": [156, 3], "ifw-3-alive": [135, 3],
};
export const KNOWN = { 2: 139.5, 3: 112, 4: 102.33, 5: 100 };
const [P, M] = [4, 8];
const short6 = (number) => String(Number(number.toPrecision(6)));

function checked(rows) {
  require(rows.length === P, `return a list of ${P} lists, one for each rank`);
  rows.forEach((row, rank) => require(row.length, `rank ${rank}: expected a list of actions like "0F0"`));
  const lists = rows.map((row, rank) => row.map((cell) => {
    try {
      return parseAction(cell, "");
    } catch {
      const expected = "expected stage, kind and microbatch, such as '2F0', of the kinds F, I, W and B";
      throw new Error(`rank ${rank}: unknown action ${pythonText(cell)}: ${expected}`);
    }
  }));
  const known = survey(lists);
  for (const { action: { stage, kind, microbatch }, rank } of known.all) {
    require("FBIW".includes(kind),
      `rank ${rank}, ${stage}${kind}${microbatch}: only F, B, I and W; messages take no time here`);
  }
  require(known.microbatches === M,
    `the last microbatch is ${known.microbatches - 1}, expected ${M - 1}: there are ${M}, from 0 on`);
  check(lists, "yours");
  const own = lists.map((list) => new Set(list.flatMap(halvesOf).map((half) => half.stage)).size);
  require(new Set(own).size === 1 && own[0] <= 3,
    `the ranks have [${own.join(", ")}] stages; each must have the same number, 1, 2 or 3`);
  return { lists, stages: own[0] };
}

export function grade26(rows) {
  const { lists, stages } = checked(rows);
  // In sixths all times are whole: F 4, I 5 and W 3 of a rank with 1, 2 or 3 stages.
  const [F, I, W] = [4, 5, 3].map((time) => (6 * time) / stages);
  const time = endOf(simulate(lists, { F, I, W, comm: 0 }, "yours")) / 6;
  const memory = Math.max(...lists.map((list) => peakLive(list, ["F"], ["W", "B"]))) / stages;
  const score = (one, other) => `time ${short6(one)}, memory ${short6(other)}`;
  for (const [name, [other, held]] of Object.entries(ROWS)) {
    const isSame = other === time && held === memory;
    const end = isSame ? "the same score; find a new one" : "which is no worse in either; beat it in one of them";
    require(other > time || held > memory, `${score(time, memory)}: ${name} has ${score(other, held)}, ${end}`);
  }
  const beaten = Object.keys(ROWS).filter((name) => time <= ROWS[name][0] && memory <= ROWS[name][1]);
  const best = Math.min(...Object.keys(KNOWN).filter((held) => Number(held) <= memory).map((held) => KNOWN[held]));
  const record = best === Infinity ? "" : `; the least time that we know within this memory: ${short6(best)}`;
  return `${score(time, memory)}; it beats ${beaten.join(", ") || "no row, and none beats it"}${record}`;
}
