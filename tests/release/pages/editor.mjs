// Answer the texts in standard input with the schedule editor's pure functions; test_editor.py compares.

import { readFileSync } from "node:fs";
import { actionText, measure } from "../../../docs/site/static/actions.js";
import { check } from "../../../docs/site/static/check.js";
import { cellsOf, compact, csvOf, parse } from "../../../docs/site/static/csv.js";
import { cutBackwards, moved, textOf, without } from "../../../docs/site/static/edits.js";
import { KNOWN, ROWS, grade10, grade11, grade26 } from "../../../docs/site/static/grade.js";
import { criticalPath } from "../../../docs/site/static/path.js";

// What a function returns, or the words of its error.
function attempt(compute) {
  try {
    return compute();
  } catch (error) {
    return { error: error.message };
  }
}

const slotTexts = (slots) => slots.map(({ action, start, end }) => [actionText(action), start, end]);

function judge(text, times) {
  const lists = parse(text, "yours");
  const report = check(lists, "yours");
  const { rows, total, bubble, live } = measure(lists, times, "yours");
  const path = slotTexts(criticalPath(rows, times.comm));
  return { report, slots: rows.map(slotTexts), total, bubble, live, path, written: csvOf(lists, "yours"),
    compact: compact(lists) };
}

function answer({ text, times, p, m }) {
  const rows = cellsOf(text).map((row) => row.map((cell) => cell.trim()).filter((cell) => cell));
  return {
    judged: attempt(() => judge(text, times)),
    graded: { 10: attempt(() => grade10(rows, p, m)), 11: attempt(() => grade11(rows, p, m)),
      26: attempt(() => grade26(rows)) },
  };
}

const rows = [["0F0", "0B0"], ["1F0", "1B0"]];
const edits = {
  removed: textOf(without(rows, { rank: 1, place: 0 })),
  later: textOf(moved(rows, { rank: 0, place: 0 }, { rank: 0, place: 2 })),
  earlier: textOf(moved(rows, { rank: 1, place: 1 }, { rank: 1, place: 0 })),
  elsewhere: textOf(moved(rows, { rank: 0, place: 1 }, { rank: 1, place: 1 })),
  middle: textOf(moved([["0F0", "0F1", "0B0"]], { rank: 0, place: 0 }, { rank: 0, place: 2 })),
  cut: textOf(cutBackwards(rows)),
};
const settings = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify({ KNOWN, ROWS, edits, answers: settings.map(answer) }));
