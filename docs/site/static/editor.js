// The page on which one writes a schedule: what the checker says of it, its times, and whether it solves an exercise.

import { actionText, halvesOf, measure, survey } from "./actions.js";
import { check } from "./check.js";
import { cellsOf, compact, csvOf, parse } from "./csv.js";
import { chipBoard } from "./chips.js";
import { activationsPlot, element, kindLegend, rankLegend, scrolling, timeline } from "./draw.js";
import { choice, explorer, lines, real, whole } from "./forms.js";
import { heading, paragraph, percent, short, strong, table } from "./forms.js";
import { grade10, grade11, grade26 } from "./grade.js";
import { criticalPath, parts } from "./path.js";
import { SCHEDULES, make } from "./schedules.js";

const NAME = "yours";
const TASKS = {
  none: { grade: null },
  "exercise 10": { grade: grade10, goal: "1F1B: its time, and on rank r at most min(m, p - r) microbatches alive" },
  "exercise 11": { grade: grade11, goal: "I and W for each B, less time than 3m + 2(p-1), and on no rank more than "
    + "min(m, p) microbatches alive from F to W" },
  "exercise 26": { grade: grade26, goal: "a time and a memory of which no row of its table has both as small" },
};

// Compute, or return the error.
function attempt(compute) {
  try {
    return { found: compute() };
  } catch (error) {
    return { error };
  }
}

const startOf = ({ name, p, m, v }) => make(name, p, m, v);

// The times of one stage: F, I and W are those of all stages of a rank.
function measured(lists, { F, I, W, comm }) {
  const share = lists.length / survey(lists).stages;
  return { ...measure(lists, { F: F * share, I: I * share, W: W * share, comm }, NAME), share };
}

const card = (kind, value, words) =>
  element("div", { class: `explorer-card ${kind}` }, strong(value), element("span", {}, words));

function pathWords(path, total) {
  const pieces = Object.entries(parts(path, total)).map(([kind, time]) => `${kind} ${short(time)}`);
  return paragraph("Thick edges: the critical path, a chain in which each action waits for the one before it. It ",
    `takes ${pieces.join(" + ")} = ${short(total)}. To be faster, put an action of the chain earlier.`);
}

// How to read the picture of a schedule with several stages on a rank, or with pairs.
function readingWords(stages, rows) {
  const words = [];
  if (stages > 1) words.push("Boxes of a rank's second and later stages are lighter and have a bar.");
  if (rows.flat().some(({ action }) => action.pair)) words.push("A box in two halves is a pair, F and B at once.");
  return words.length ? [paragraph(words.join(" "))] : [];
}

// The times and pictures of a right schedule.
function pictures(lists, report, settings) {
  const found = measured(lists, settings);
  const { rows, total, share } = found;
  const path = criticalPath(rows, settings.comm);
  const marked = new Set(path.flatMap((slot) => halvesOf(slot.action).map(actionText)));
  const kinds = new Set(rows.flat().flatMap((slot) => halvesOf(slot.action).map((half) => half.kind)));
  const start = measured(startOf(settings), settings);
  const most = (peaks, part) => short(Math.max(...peaks) * part);
  const scaled = (counts) => counts.map((count) => short(count * share));
  return [
    element("div", { class: "explorer-cards" },
      card("", short(total), `total time (${settings.name}: ${short(start.total)})`),
      card("", percent(found.bubble), `bubble: idle / total (${settings.name}: ${percent(start.bubble)})`),
      card("", most(found.peaks, share),
        `activations alive at most on a rank (${settings.name}: ${most(start.peaks, start.share)})`)),
    scrolling(timeline({ ...found, marked })), kindLegend(["F", "B", "I", "W"].filter((kind) => kinds.has(kind))),
    ...readingWords(1 / share, rows), pathWords(path, total),
    heading("Activations alive"),
    scrolling(activationsPlot({ ...found, stages: 1 / share })), rankLegend(lists.length),
    table(["rank", ...lists.map((_, rank) => rank)], [
      ["activations at most", ...scaled(report.activations)],
      ["I without its W at most", ...scaled(report.weightGradients)],
      ["messages sent", ...report.sends],
    ]),
  ];
}

// What the grader of the chosen exercise says.
function verdict({ task, list, p, m }) {
  const { grade, goal } = TASKS[task];
  if (!grade) return [];
  const rows = cellsOf(list).map((row) => row.map((cell) => cell.trim()).filter((cell) => cell));
  const { found, error } = attempt(() => grade(rows, p, m));
  const words = error ? `The grader: ${error.message}` : `The grader: ${found}`;
  return [paragraph(strong(`${task}, p = ${p}, m = ${m}: `), `${goal}.`),
    card(error ? "bad" : "good", error ? "not yet" : "solved", words)];
}

function saveLink(lists) {
  const { found = compact(lists) } = attempt(() => csvOf(lists, NAME));
  return element("a", { class: "chip-save", download: `${NAME}.csv`,
    href: `data:text/csv;charset=utf-8,${encodeURIComponent(found)}` }, "save as CSV");
}

// The command that trains with the saved schedule, with a layer in each stage.
function command(lists) {
  const { stages, microbatches: m } = survey(lists);
  return `mpirun -n ${lists.length} python -m minipar.train --pp ${lists.length} --layers ${stages} `
    + `--microbatches ${m} --global-batch ${m} --schedule ${NAME}.csv`;
}

const board = chipBoard();
let old = []; // the pictures of the last schedule that was right

function show(settings, change) {
  const rows = cellsOf(settings.list).map((row) => row.map((cell) => cell.trim()).filter((cell) => cell));
  const { found, error } = attempt(() => {
    const lists = parse(settings.list, NAME);
    return { lists, report: check(lists, NAME) };
  });
  board.show(rows, { rank: error?.rank, action: error?.action }, change);
  if (error) {
    return [card("bad", "wrong", `The checker: ${error.message}`), ...verdict(settings),
      element("div", { class: "explorer-old" }, ...old)];
  }
  old = pictures(found.lists, found.report, settings);
  const words = "The checker: every action is there once, and nobody waits forever.";
  return [card("good", "right", words), ...verdict(settings), ...old,
    paragraph(saveLink(found.lists), " and train with it:"),
    element("pre", { class: "scrolls", tabindex: 0 }, command(found.lists))];
}

const EQUAL = { F: 1, I: 1, W: 1, comm: 0 };
const form = explorer("schedule-editor", [
  choice("task", "grade as", Object.keys(TASKS)),
  choice("name", "starting point", SCHEDULES, "1f1b"),
  whole("p", "p: ranks", 4, 1, 8),
  whole("m", "m: microbatches", 8, 1, 32),
  whole("v", "v: stages per rank", 2, 1, 4, ({ name }) => name === "interleaved-1f1b"),
  real("F", "F: time of a forward", 1, 0, 1000),
  real("I", "I: backward for the input", 1, 0, 1000),
  real("W", "W: backward for the weights", 1, 0, 1000),
  real("comm", "time of a message", 0, 0, 1000),
  lines("list", "the schedule: a line for each rank, stage, kind and microbatch of each action",
    (settings) => compact(startOf(settings))),
], show, {
  "free play": { ...EQUAL, task: "none", name: "1f1b", p: 4, m: 8 },
  "exercise 10: 1F1B as lists": { ...EQUAL, task: "exercise 10", name: "gpipe", p: 4, m: 8 },
  "exercise 11: beat 1F1B": { ...EQUAL, task: "exercise 11", name: "1f1b", p: 4, m: 8 },
  "exercise 26: time and memory": { F: 4, I: 5, W: 3, comm: 0, task: "exercise 26", name: "zbv", p: 4, m: 8 },
  "exercise 27: 71 steps?": { ...EQUAL, W: 0, task: "none", name: "1f1b", p: 8, m: 32 },
});
form?.after(board.box);
