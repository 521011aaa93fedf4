// Schedules as text, in JavaScript: PyTorch's CSV of visualize/schedule_file.py, and parse_action of minipar's
// actions.py. tests/release/pages/test_editor.py compares every list, every written text and every message of an error.

import { COMPUTE, MESSAGES, PAIR, act, actionText, computes, paired, simulate } from "./actions.js";

const ACTION = /^(\d{1,9})([A-Z_]+)(\d{1,9})$/;
const TWO = new RegExp(`^\\((\\d+F\\d+);(\\d+B\\d+)\\)${PAIR}$`);
const FSDP = /^\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*$/;

const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\" };
const hexadecimal = (code, digits) => code.toString(16).padStart(digits, "0");

// Write characters as Python writes a string.
export function quoted(characters) {
  const isDouble = characters.includes("'") && !characters.includes('"');
  const quote = isDouble ? '"' : "'";
  const write = (character) => {
    if (character === quote) return `\\${quote}`;
    if (character in NAMED) return NAMED[character];
    if (character === " " || !/[\p{C}\p{Z}]/u.test(character)) return character;
    const code = character.codePointAt(0);
    if (code < 0x100) return `\\x${hexadecimal(code, 2)}`;
    return code < 0x10000 ? `\\u${hexadecimal(code, 4)}` : `\\U${hexadecimal(code, 8)}`;
  };
  return quote + characters.map(write).join("") + quote;
}

// The same with at most 30 characters, as Python's reprlib shortens it: the beginning and the end.
function shortened(text) {
  const characters = Array.from(text);
  const whole = Array.from(quoted(characters.slice(0, 30)));
  if (whole.length <= 30) return whole.join("");
  const last = characters.slice(Math.max(0, characters.length - 14));
  const ends = Array.from(quoted([...characters.slice(0, 13), ...last]));
  return [...ends.slice(0, 13), "...", ...ends.slice(-14)].join("");
}

// Read "2F0", or "(2F0;1B1)OVERLAP_F_B". An error begins with `where`.
export function parseAction(cell, where) {
  const text = cell.trim();
  const two = TWO.exec(text);
  if (two) return paired(parseAction(two[1], where), parseAction(two[2], where));
  const one = ACTION.exec(text);
  const kinds = [...COMPUTE, ...MESSAGES];
  if (!one || !kinds.includes(one[2])) {
    const rule = `expected stage, kind, microbatch, of the kinds ${kinds.join(", ")}, or (F;B)${PAIR}`;
    throw new Error(`${where}unknown action ${shortened(text)}: ${rule}`);
  }
  return act(Number(one[1]), one[2], Number(one[3]));
}

// The cells of each row; blank lines at the end are no rows.
export function cellsOf(text) {
  const rows = text.split(/\r\n|\r|\n/);
  while (rows.length && rows[rows.length - 1] === "") rows.pop();
  return rows.map((row) => (row === "" ? [] : row.split(",").map((cell) => cell.replace(/^"([^"]*)"$/, "$1"))));
}

// Read a text as the file NAME.csv: a list of actions for each rank. Empty cells are idle steps.
export function parse(text, name) {
  const lists = cellsOf(text).map((row, rank) => row.flatMap((cell, place) => {
    const isNothing = cell.trim() === "" || FSDP.test(cell.trim());
    return isNothing ? [] : [parseAction(cell, `schedule ${name}.csv, rank ${rank}, cell ${place + 1}: `)];
  }));
  if (!lists.some((list) => list.length)) throw new Error(`schedule ${name}.csv holds no actions`);
  return lists;
}

// Write lists without idle steps.
export const compact = (lists) => lists.map((list) => `${list.map(actionText).join(",")}\n`).join("");

// Write lists as save_csv does: a cell for each time step. Messages take none, so lists that have them have no idle
// steps. B is one cell too where no backward is split.
export function csvOf(lists, name) {
  if (!lists.flat().every(computes)) return compact(lists);
  const unit = lists.flat().some(({ kind }) => kind === "W") ? 1 : 2;
  const rows = simulate(lists, { F: unit, I: 1, W: 1, comm: 0 }, name).map((slots) => {
    const row = [];
    for (const { action, start } of slots) {
      while (row.length < Math.floor(start / unit)) row.push("");
      row.push(actionText(action));
    }
    return row;
  });
  return rows.map((row) => `${row.join(",")}\n`).join("");
}
