// The checker of schedules in JavaScript: minipar/parallel/pipeline/check.py. An error has the words of Python's, and
// the wrong action where it names one. tests/release/pages/test_editor.py compares all words and reports.

import { COMPUTE, act, actionText, computes, halvesOf, needs, peakLive, simulate, survey } from "./actions.js";
import { otherEnd, refuseCircles } from "./in_order.js";

const upTo = (count) => Array.from({ length: count }, (_, k) => k);

function refuse(name, rank, action, problem) {
  const words = `schedule ${name}, rank ${rank}, ${actionText(action)}: ${problem}`;
  throw Object.assign(new Error(words), { rank, action: actionText(action) });
}

// The [SEND, RECV] of a computation's result, or undefined if no other rank needs it.
function messageOf({ stage, kind, microbatch }, { home }) {
  if (kind === "W") return undefined;
  const send = act(stage, kind === "F" ? "SEND_F" : "SEND_B", microbatch);
  const receive = otherEnd(send);
  const here = home.get(stage);
  return (home.get(receive.stage) ?? here) === here ? undefined : [send, receive];
}

// What is wrong with these computations of one microbatch in one stage, "" if nothing is.
function problemOf(stage, microbatch, kinds) {
  const isSplit = kinds.includes("I") || kinds.includes("W");
  if (isSplit && kinds.includes("B")) return "both B and I or W";
  const missing = (isSplit ? ["F", "I", "W"] : ["F", "B"]).find((kind) => !kinds.includes(kind));
  return missing ? `${stage}${missing}${microbatch} is missing` : "";
}

// Each stage is on one rank, with one F and one backward for each microbatch.
function checkComplete(lists, known, name) {
  const count = new Map();
  for (const text of known.all.map(({ action }) => actionText(action))) count.set(text, (count.get(text) ?? 0) + 1);
  lists.forEach((list, rank) => {
    if (!list.some(computes)) throw new Error(`schedule ${name}, rank ${rank}: it computes nothing`);
  });
  for (const { action, rank } of known.all) {
    const times = count.get(actionText(action));
    if (times > 1) refuse(name, rank, action, `done ${times} times`);
    const home = known.home.get(action.stage);
    if (home !== rank) refuse(name, rank, action, `stage ${action.stage} is on rank ${home} too`);
  }
  for (let stage = 0; stage < known.stages; stage += 1) {
    if (!known.home.has(stage)) throw new Error(`schedule ${name}: no rank has stage ${stage} of ${known.stages}`);
    for (let microbatch = 0; microbatch < known.microbatches; microbatch += 1) {
      const problem = problemOf(stage, microbatch, COMPUTE.filter((kind) => count.has(`${stage}${kind}${microbatch}`)));
      const where = `rank ${known.home.get(stage)}, stage ${stage}, microbatch ${microbatch}`;
      if (problem) throw new Error(`schedule ${name}, ${where}: ${problem}`);
    }
  }
}

// Check the message from a result to its user on another rank. Return its ends with their ranks.
function checkMessage(known, position, need, user, name) {
  const [send, receive] = messageOf(need, known);
  const source = known.home.get(need.stage);
  const rank = known.home.get(user.stage);
  const ends = [[send, source], [receive, rank]];
  for (const [end, where] of ends) {
    if (!position.has(actionText(end))) {
      const problem = `needs ${actionText(need)} from rank ${source}, but rank ${where} has no ${actionText(end)}`;
      refuse(name, rank, user, problem);
    }
  }
  const place = (action) => position.get(actionText(action));
  if (place(send) < place(need)) {
    refuse(name, source, send, `comes before ${actionText(need)}, whose result it sends`);
  }
  if (place(receive) > place(user)) refuse(name, rank, receive, `comes after ${actionText(user)}, which needs it`);
  return ends.map(([end, where]) => `${where}: ${actionText(end)}`);
}

// Each result is made before it is used; if the lists have messages, it is sent and received between, and nothing else.
function checkOrder(lists, known, name) {
  const position = new Map(lists.flatMap((list) =>
    list.flatMap((action, place) => halvesOf(action).map((half) => [actionText(half), place]))));
  const hasMessages = known.all.some(({ action }) => !computes(action));
  const expected = new Set();
  for (const { action, rank } of known.all) {
    if (!computes(action)) continue;
    for (const need of needs(action, known)) {
      if (known.home.get(need.stage) !== rank) {
        if (hasMessages) checkMessage(known, position, need, action, name).forEach((end) => expected.add(end));
      } else if (position.get(actionText(need)) > position.get(actionText(action))) {
        refuse(name, rank, action, `comes before ${actionText(need)}, whose result it needs`);
      }
    }
  }
  for (const { action, rank } of known.all) {
    if (!computes(action) && !expected.has(`${rank}: ${actionText(action)}`)) {
      refuse(name, rank, action, "no computation needs this message");
    }
  }
}

// Return what a correct schedule holds and sends: for each rank the most activations, the most I without their W, and
// the number of messages. Lists without messages need no check for circles: `lower` of check.py adds the messages in an
// order that bears blocking sends.
export function check(lists, name) {
  const known = survey(lists);
  checkComplete(lists, known, name);
  checkOrder(lists, known, name);
  simulate(lists, { F: 1, I: 1, W: 1, comm: 0 }, name); // refuses ranks that wait for one another
  if (!lists.flat().every(computes)) refuseCircles(lists, name);
  const sent = (rank) => known.all.filter((each) =>
    each.rank === rank && computes(each.action) && messageOf(each.action, known));
  return {
    activations: lists.map((list) => peakLive(list)),
    weightGradients: lists.map((list) => peakLive(list, ["I"], ["W"])),
    sends: upTo(lists.length).map((rank) => sent(rank).length),
  };
}
