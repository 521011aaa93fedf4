// The board on which one changes a schedule: a row of boxes for each rank, which are dragged, or chosen and moved with
// buttons and keys. It knows cells as text alone, so that a wrong one is shown as well.

import { COLOURS, element } from "./draw.js";
import { cutBackwards, moved, textOf, without } from "./edits.js";

const EDGE = 40; // pixels from the board's edge in which a finger scrolls it
const STEP = 12; // by so many pixels for each of its moves
const KINDS = { F: "forward", B: "backward", I: "backward for the input", W: "backward for the weights",
  SEND: "message to", RECV: "message from" };

// {kind, words} of a cell's text; an unknown one has no kind.
function reading(cell) {
  if (cell.startsWith("(")) return { kind: "pair", words: `a forward and a backward at once, ${cell}` };
  const found = /^(\d+)(F|B|I|W|SEND|RECV)(?:_[FB])?(\d+)$/.exec(cell);
  if (!found) return { kind: "", words: `${cell}: no action` };
  const [, stage, kind, microbatch] = found;
  const direction = cell.endsWith(`_F${microbatch}`) ? " of a forward" : "";
  return { kind, words: `${KINDS[kind]}${direction}, stage ${stage}, microbatch ${microbatch}` };
}

function chip(cell, rank, place, { isChosen, isWrong, isEntry }) {
  const { kind, words } = reading(cell);
  const look = element("button", { type: "button", class: `chip ${isWrong ? "wrong" : ""}`, draggable: "true",
    "data-rank": rank, "data-place": place, "aria-pressed": isChosen, tabindex: isEntry ? 0 : -1, title: words,
    "aria-label": `${words}, action ${place + 1} of rank ${rank}` }, cell.replace("OVERLAP_F_B", ""));
  if (COLOURS[kind]) look.style.background = COLOURS[kind];
  look.style.color = kind === "F" ? "white" : COLOURS[kind] ? "#222222" : "inherit";
  return look;
}

// Let a finger drag the box that is chosen; the style sheet keeps the page from scrolling meanwhile.
// `find` returns where it would go, `mark` shows this, `put` moves it there. Near an edge the board scrolls.
function dragByTouch(board, find, mark, put) {
  let touching = false;
  board.addEventListener("pointerdown", ({ pointerType, target }) => {
    touching = pointerType !== "mouse" && target.matches('.chip[aria-pressed="true"]');
  });
  board.addEventListener("pointermove", ({ clientX, clientY }) => {
    if (!touching) return;
    const { left, right } = board.getBoundingClientRect();
    if (clientX > right - EDGE) board.scrollLeft += STEP;
    if (clientX < left + EDGE) board.scrollLeft -= STEP;
    mark(find(clientX, clientY));
  });
  const end = (isDropped) => ({ clientX, clientY }) => {
    const to = touching && isDropped ? find(clientX, clientY) : null;
    touching = false;
    mark(null);
    if (to) put(to);
  };
  board.addEventListener("pointerup", end(true));
  board.addEventListener("pointercancel", end(false));
}

const spotOf = (chosen) => ({ rank: Number(chosen.dataset.rank), place: Number(chosen.dataset.place) });

export function chipBoard() {
  const state = { rows: [], chosen: null, wrong: {}, past: [], sent: "", send: () => {} };
  const board = element("div", { class: "chips scrolls", role: "group",
    "aria-label": "the actions of each rank, in order; arrow keys choose, with shift they move, delete removes" });
  const words = element("span", { class: "chip-words", "aria-live": "polite" });
  const tools = element("p", { class: "chip-tools" });

  const edit = (rows, chosen) => {
    state.chosen = chosen;
    state.sent = textOf(rows);
    state.send({ list: state.sent });
  };
  // Move the chosen action to a place.
  const put = (to) => {
    const { rows, chosen } = state;
    const isLater = chosen.rank === to.rank && chosen.place < to.place;
    const end = { rank: to.rank, place: isLater ? to.place - 1 : to.place };
    if (end.rank !== chosen.rank || end.place !== chosen.place) edit(moved(rows, chosen, to), end);
  };
  // Move the chosen action by some places in its row, or to another rank.
  const shift = (places, ranks) => {
    const { rank, place: at } = state.chosen;
    const row = state.rows[rank + ranks];
    if (!row || at + places < 0 || (ranks === 0 && at + places >= row.length)) return;
    put({ rank: rank + ranks, place: ranks ? Math.min(at, row.length) : at + places + (places > 0 ? 1 : 0) });
  };
  const remove = () => {
    const { rank, place } = state.chosen;
    const left = state.rows[rank].length - 1;
    edit(without(state.rows, state.chosen), left ? { rank, place: Math.min(place, left - 1) } : null);
  };
  const choose = (chosen) => {
    state.chosen = chosen;
    draw();
  };
  const step = (places, ranks) => {
    const rank = Math.min(state.rows.length - 1, Math.max(0, state.chosen.rank + ranks));
    const most = state.rows[rank].length - 1;
    if (most >= 0) choose({ rank, place: Math.min(most, Math.max(0, state.chosen.place + places)) });
  };
  const tool = (label, act, title) => {
    const button = element("button", { type: "button", title }, label);
    button.addEventListener("click", act);
    tools.append(button, " ");
    return button;
  };
  const ofChosen = [
    tool("earlier", () => shift(-1, 0), "move the chosen action one place to the left"),
    tool("later", () => shift(1, 0), "move the chosen action one place to the right"),
    tool("remove", remove, "remove the chosen action"),
  ];
  const cut = tool("cut every B into I and W", () => edit(cutBackwards(state.rows), null),
    "I is the gradient of the stage's input, W those of its weights");
  const undo = tool("undo", () => {
    state.past.pop();
    state.send({ list: state.past.pop() });
  }, "take the last change back");
  tool("start again", () => state.send({}, true), "the starting point, unchanged");
  tools.append(words);

  function draw(wrong = state.wrong) {
    state.wrong = wrong;
    const { rows, chosen } = state;
    const hadFocus = board.contains(document.activeElement);
    const entry = chosen ?? { rank: rows.findIndex((row) => row.length), place: 0 };
    board.replaceChildren(...rows.map((row, rank) => element("div", { class: "chip-row", "data-rank": rank },
      element("span", { class: "chip-rank" }, `rank ${rank}`),
      ...row.map((cell, at) => chip(cell, rank, at, {
        isChosen: chosen !== null && chosen.rank === rank && chosen.place === at,
        isEntry: entry.rank === rank && entry.place === at,
        isWrong: wrong.rank === rank && wrong.action === cell,
      })))));
    const current = board.querySelector('[aria-pressed="true"]');
    if (hadFocus) (current ?? board.querySelector(".chip"))?.focus();
    for (const button of ofChosen) button.disabled = !current;
    cut.disabled = !rows.flat().some((cell) => /^\d+B\d+$/.test(cell));
    undo.disabled = state.past.length < 2;
    words.textContent = current ? current.title : "choose an action, or drag one";
  }

  board.addEventListener("click", ({ target }) => {
    if (target.classList.contains("chip")) choose(spotOf(target));
  });
  board.addEventListener("keydown", (event) => {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!event.target.classList.contains("chip")) return;
    state.chosen = spotOf(event.target);
    if (event.key in ways) (event.shiftKey ? shift : step)(...ways[event.key]);
    else if (event.key === "Delete" || event.key === "Backspace") remove();
    else return;
    event.preventDefault();
  });
  // Where a dragged action would go: before the box at a place of the page, behind it, or to the end of the row.
  const targetAt = (at, x) => {
    const row = at?.closest(".chip-row");
    if (!row) return null;
    const under = at.closest(".chip");
    const rank = Number(row.dataset.rank);
    if (!under) return { rank, place: at.matches(".chip-rank") ? 0 : state.rows[rank].length };
    const area = under.getBoundingClientRect();
    return { rank, place: spotOf(under).place + (x > area.left + area.width / 2 ? 1 : 0) };
  };
  const mark = (to) => {
    for (const each of board.querySelectorAll(".drop")) each.classList.remove("drop");
    if (to) board.querySelectorAll(".chip-row")[to.rank].children[to.place].classList.add("drop");
  };
  board.addEventListener("dragstart", (event) => {
    state.chosen = spotOf(event.target);
    event.dataTransfer.setData("text/plain", event.target.textContent);
  });
  board.addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(targetAt(event.target, event.clientX));
  });
  board.addEventListener("dragend", () => mark(null));
  board.addEventListener("drop", (event) => {
    event.preventDefault();
    const to = targetAt(event.target, event.clientX);
    if (to && state.chosen) put(to);
    mark(null);
  });
  dragByTouch(board, (x, y) => targetAt(document.elementFromPoint(x, y), x), mark, put);

  // Show rows of cells. `wrong` is {rank, action} of what the checker refuses; send({list}) changes the text.
  const show = (rows, wrong, send) => {
    const text = textOf(rows);
    if (text !== state.past[state.past.length - 1]) {
      state.past.push(text);
      if (text !== state.sent) state.chosen = null; // it was typed, or a new start
    }
    Object.assign(state, { rows, send });
    draw(wrong);
  };
  return { box: element("div", { class: "chip-board" }, tools, board), show };
}
