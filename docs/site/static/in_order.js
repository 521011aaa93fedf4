// Lists whose messages block: a circle of actions that wait for one another, in JavaScript. It is simulate_in_order of
// chapters/support/ch08/in_order.py with one channel per rank, without its times.
// tests/release/pages/test_editor.py compares the words.

import { act, actionText, computes, halvesOf } from "./actions.js";

const USED = { F: "RECV_F", B: "RECV_B", I: "RECV_B" }; // the message that a computation uses
const isReceive = ({ kind }) => kind === "RECV_F" || kind === "RECV_B";

// The SEND of a RECV, or the RECV of a SEND: the same message on the neighbouring stage.
export function otherEnd({ stage, kind, microbatch }) {
  const [end, direction] = kind.split("_");
  const isDown = (direction === "F") === (end === "SEND");
  return act(stage + (isDown ? 1 : -1), `${end === "SEND" ? "RECV" : "SEND"}_${direction}`, microbatch);
}

// Both ends of a message are one event, its SEND.
const eventOf = (action) => actionText(isReceive(action) ? otherEnd(action) : action);

// For each event those that it waits for, each with the order in a rank's list that makes it wait.
function waitsOf(lists) {
  const received = new Set(lists.flat().filter(isReceive).map(actionText));
  const waits = new Map();
  lists.forEach((list, rank) => {
    let computed; // the last computation so far
    let moved; // the last message so far
    for (const action of list) {
      const earlier = computed === undefined ? [] : [computed];
      if (computes(action)) {
        computed = action;
      } else {
        if (moved !== undefined) earlier.push(moved);
        moved = action;
      }
      for (const half of halvesOf(action)) {
        const receive = act(half.stage, USED[half.kind], half.microbatch);
        if (received.has(actionText(receive))) earlier.push(receive);
      }
      const event = eventOf(action);
      if (!waits.has(event)) waits.set(event, new Map());
      for (const each of earlier) waits.get(event).set(eventOf(each), { rank, earlier: each, later: action });
    }
  });
  return waits;
}

// The first circle that Python's graphlib finds: events, of which each is waited for by the next one, and the first
// again. Undefined if there is none.
function circleOf(waits) {
  const after = new Map(); // the events that wait for each event
  for (const [event, others] of waits) {
    if (!after.has(event)) after.set(event, []);
    for (const other of others.keys()) after.set(other, [...(after.get(other) ?? []), event]);
  }
  const seen = new Set();
  for (const first of after.keys()) {
    if (seen.has(first)) continue;
    seen.add(first);
    const path = [first];
    const left = [[...after.get(first)]]; // for each event of the path, the events after it that are still to be tried
    while (path.length) {
      const next = left[left.length - 1].shift();
      if (next === undefined) {
        path.pop();
        left.pop();
      } else if (path.includes(next)) {
        return [...path.slice(path.indexOf(next)), next];
      } else if (!seen.has(next)) {
        seen.add(next);
        path.push(next);
        left.push([...after.get(next)]);
      }
    }
  }
  return undefined;
}

// Name the actions that wait for one another, a pair for each rank on the way.
function describe(orders) {
  const stretches = [];
  for (const order of orders) {
    const last = stretches[stretches.length - 1];
    if (last && last.rank === order.rank) last.later = order.later;
    else stretches.push({ ...order });
  }
  return stretches.map(({ rank, earlier, later }) =>
    `rank ${rank} has ${actionText(earlier)} before ${actionText(later)}`).join(", ");
}

// Throw an error if the ranks would wait in a circle when sends block.
export function refuseCircles(lists, name) {
  const waits = waitsOf(lists);
  const circle = circleOf(waits);
  if (circle === undefined) return;
  const orders = circle.slice(1).map((after, place) => waits.get(after).get(circle[place]));
  throw new Error(`schedule ${name} deadlocks if sends block until they are received, as with one channel per rank: `
    + describe(orders));
}
