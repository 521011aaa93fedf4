// Answer the settings in standard input with the explorers' pure functions; test_explorers.py compares.

import { readFileSync } from "node:fs";
import { actionText } from "../../../docs/site/static/actions.js";
import { COLOURS } from "../../../docs/site/static/draw.js";
import { PRECISIONS, modelState } from "../../../docs/site/static/memory.js";
import { SCHEDULES, explore } from "../../../docs/site/static/schedules.js";
import { MODELS, parameters } from "../../../docs/site/static/models.js";
import { PLANNED, bubble, closedBubble } from "../../../docs/site/static/layouts.js";
import { impossible, memory, volume } from "../../../docs/site/static/traffic.js";

const ANSWERS = {
  schedule(setting) {
    const { rows, total, bubble, peaks, live } = explore(setting);
    const slots = rows.map((row) => row.map(({ action, start, end }) => [actionText(action), start, end]));
    return { slots, total, bubble, peaks, live };
  },
  state: (setting) => modelState({ ...setting, precision: PRECISIONS[setting.precision] }),
  layout(setting) {
    const s = { ...setting, precision: PRECISIONS[setting.precision] };
    const problem = impossible(s);
    if (problem) throw new Error(problem);
    return { parameters: parameters(s), sent: volume(s), held: memory(s), bubble: bubble(s), closed: closedBubble(s) };
  },
};

function answer([kind, setting]) {
  try {
    return ANSWERS[kind](setting);
  } catch (error) {
    return { error: error.message };
  }
}

const settings = JSON.parse(readFileSync(0, "utf8"));
const write = (key, value) => (typeof value === "bigint" ? String(value) : value);
console.log(JSON.stringify({ COLOURS, PRECISIONS, SCHEDULES, PLANNED, MODELS, answers: settings.map(answer) }, write));
