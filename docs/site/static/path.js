// The critical path of a schedule: a chain of actions, of which each begins when the one before it has ended, or when
// its result has arrived. It reaches from time 0 to the end, so the lists cannot run in less time.
// tests/release/pages/test_editor.py checks that on random schedules, and compares with the chain of chapter 7.

import { actionText, halvesOf, needs, survey } from "./actions.js";

// Return the slots of the chain, in their order.
export function criticalPath(rows, comm) {
  const known = survey(rows.map((row) => row.map(({ action }) => action)));
  const places = new Map(rows.flatMap((row, rank) => row.map((slot, place) => [slot, { rank, place }])));
  const made = new Map(rows.flat().flatMap((slot) => halvesOf(slot.action).map((half) => [actionText(half), slot])));
  let slot = rows.flat().reduce((last, each) => (each.end > last.end ? each : last));
  const path = [slot];
  while (slot.start > 0) {
    const { start, action } = slot;
    const { rank, place } = places.get(slot);
    const before = rows[rank][place - 1];
    const arrival = (source) => source.end + (places.get(source).rank === rank ? 0 : comm);
    const sources = needs(action, known).map((need) => made.get(actionText(need)));
    slot = before?.end === start ? before : sources.find((source) => arrival(source) === start);
    path.unshift(slot);
  }
  return path;
}

// How much of the chain is work of each kind, and how much is messages.
export function parts(path, total) {
  const found = {};
  for (const { action, start, end } of path) {
    const kind = halvesOf(action).map((half) => half.kind).join("&");
    found[kind] = (found[kind] ?? 0) + (end - start);
  }
  const messages = total - Object.values(found).reduce((sum, part) => sum + part, 0);
  return messages > 0 ? { ...found, messages } : found;
}
