// The viewer of traces: one trace above the other on the same time scale. A file of the reader's own is read in the
// page, and nothing leaves it. TRACES, recorded by docs/site/traces.py, is in the script before this one.

import { element, legend } from "./draw.js";
import { heading } from "./forms.js";
import { COMMUNICATION, COMPUTATION, extentOf, parseTrace, readTrace, stepsOf, whatOf } from "./trace.js";
import { coloursOf, legendOf } from "./trace_colours.js";
import { arrowsOf, drawTrace, layRows, scaleOf, unitOf } from "./trace_rows.js";
import { comparison, partOf, sharesTable, sliceWords, summary } from "./trace_words.js";
import { listen, panned, zoomed } from "./trace_moves.js";

const MOST_BYTES = 200e6; // of a file
const NOTHING = ""; // the choice of no trace
const ZOOM = 1.5; // of one key or button
const REACH = 3; // pixels: a slice so near to the pointer is meant
const HELP = "Point at a bar, or tap it, for its operation, bytes and seconds. Drag to move; Ctrl and the wheel, or "
  + "two fingers, zoom. Keys in a picture: + and - zoom, left and right move, 0 shows everything, up and down choose a "
  + "row, comma and full stop the bar before and the bar after.";

const isRecorded = (name) => Object.hasOwn(TRACES, name);
const option = (value, words) => element("option", { value }, words);
const labelled = (words, control) => element("label", {}, element("span", {}, words), control);

// The names of all slices that can be drawn.
function namesIn(trace) {
  const shown = ([track]) => track === COMPUTATION || track.startsWith(COMMUNICATION);
  return trace.ranks.flatMap(({ tracks }) =>
    [...tracks].filter(shown).flatMap(([, slices]) => slices.map(({ name }) => whatOf(name))));
}

// Everything that is on the screen follows from these: the traces by name, the two that are chosen, the part of them,
// the view, and the slice that is pointed at.
function openViewer(place) {
  const known = new Map(Object.entries(TRACES));
  const state = { chosen: [NOTHING, NOTHING], part: "last", view: undefined, arrows: false, slice: undefined };
  const panels = ["above", "below"].map((side, index) => makePanel(side, index));
  const parts = element("select", { name: "part" });
  const arrows = element("input", { type: "checkbox", name: "arrows" });
  const colourWords = element("div");
  const compared = element("div", { "aria-live": "polite" });
  const details = element("p", { class: "trace-details", "aria-live": "polite" });
  let colours = {};

  function traceOf(index) {
    const found = known.get(state.chosen[index]);
    if (!found) return undefined;
    found.parsed ??= parseTrace(found.trace, found.words);
    found.extent ??= extentOf(found.parsed);
    return found.parsed;
  }

  const shown = () => [0, 1].filter((index) => traceOf(index));
  const partAt = (index) => partOf(traceOf(index), state.part);

  // How far one can move: to the first and to the last slice of both traces, in seconds from their parts' beginnings.
  function limits() {
    const ends = shown().map((index) => {
      const [first, last] = known.get(state.chosen[index]).extent;
      const { begin } = partAt(index);
      return [first - begin, last - begin];
    });
    return { from: Math.min(...ends.map(([from]) => from)), to: Math.max(...ends.map(([, to]) => to)) };
  }

  function makePanel(side, index) {
    const id = `trace-${side}`;
    const select = element("select", { name: side });
    const file = element("input", { type: "file", name: `${side}-file`, accept: ".json,application/json" });
    const problem = element("p", { class: "explorer-problem", role: "alert" });
    const words = element("div");
    const picture = element("div", { class: "trace-rows", tabindex: 0, role: "application",
      "aria-label": `timeline ${side}`, "aria-describedby": "trace-help" });
    const note = element("p", { hidden: "" });
    const shares = element("div");
    const chooser = element("div", { class: "trace-choice" }, labelled(`${side}: `, select),
      labelled("or a file of yours: ", file));
    const body = element("section", { class: "trace-panel", "aria-label": side });
    body.append(chooser, problem, words, note, picture);
    select.addEventListener("input", () => choose(index, select.value));
    file.addEventListener("change", () => file.files.length && open(index, file.files[0]));
    body.addEventListener("drop", (event) => {
      event.preventDefault();
      event.stopPropagation();
      if (event.dataTransfer.files.length) open(index, event.dataTransfer.files[0]);
    });
    listen(picture, {
      zoom: (factor, at) => move((view, ends) => zoomed(view, ends, factor, at)),
      pan: (share) => move((view, ends) => panned(view, ends, share)),
      point: (x, y) => point(index, x, y),
      key: (name) => press(index, name),
    });
    return { id, side, select, problem, words, note, picture, shares, body };
  }

  // ---- what one does ------------------------------------------------------------------------------------------------

  function choose(index, name) {
    state.chosen[index] = name;
    panels[index].problem.textContent = "";
    fit();
    remember();
  }

  // The page's address keeps what is chosen: #trace-viewer?above=1f1b&below=zb-h1. A file of the reader's own has none.
  function remember() {
    const [above, below] = state.chosen.map((name) => (isRecorded(name) ? name : NOTHING));
    window.history.replaceState(null, "", `#${place.id}?${new URLSearchParams({ above, below, part: state.part })}`);
  }

  function restore() {
    const [id, query] = window.location.hash.slice(1).split("?");
    const wanted = new URLSearchParams(id === place.id ? query : "");
    const [above, below] = [wanted.get("above"), wanted.get("below")];
    state.chosen = [isRecorded(above) ? above : "demo", isRecorded(below) ? below : NOTHING];
    const part = wanted.get("part");
    state.part = /^(all|[1-9]\d*)$/.test(part) ? part : "last";
    fit();
  }

  async function open(index, file) {
    try {
      if (file.size > MOST_BYTES) {
        throw new Error(`${file.name} has ${(file.size / 1e6).toFixed(0)} MB, more than ${MOST_BYTES / 1e6}: `
          + "write a trace of fewer steps");
      }
      const parsed = readTrace(await file.text(), file.name);
      const [begin, end] = extentOf(parsed);
      if (!(end > begin)) throw new Error(`${file.name} holds nothing that took time`);
      known.set(`file ${file.name}`, { words: file.name, parsed });
      choose(index, `file ${file.name}`);
    } catch (error) {
      panels[index].problem.textContent = error.message;
    }
  }

  function fit() {
    const span = Math.max(...shown().map((index) => partAt(index).end - partAt(index).begin));
    state.view = shown().length ? { from: 0, span } : undefined;
    state.slice = undefined;
    update();
  }

  function move(change) {
    if (!state.view) return;
    state.view = change(state.view, limits());
    redraw();
  }

  const MOVES = {
    in: () => move((view, ends) => zoomed(view, ends, 1 / ZOOM)),
    out: () => move((view, ends) => zoomed(view, ends, ZOOM)),
    left: () => move((view, ends) => panned(view, ends, -0.2)),
    right: () => move((view, ends) => panned(view, ends, 0.2)),
    fit,
  };

  function press(index, name) {
    if (name in MOVES) MOVES[name]();
    else if (traceOf(index)) select(index, name);
  }

  // Choose the row above or below, or the slice before or after.
  function select(index, name) {
    const { rows } = layRows(traceOf(index));
    const { begin } = partAt(index);
    const old = state.slice?.panel === index ? state.slice : undefined;
    if (name === "up" || name === "down") {
      const way = name === "down" ? 1 : -1;
      let row = old ? old.row : name === "down" ? -1 : rows.length;
      do row += way; while (rows[row] && !rows[row].slices.length);
      if (!rows[row]) return;
      const time = old ? old.slice.start : begin + state.view.from;
      const slice = rows[row].slices.find(({ end }) => end >= time) ?? rows[row].slices[0];
      return show(index, row, slice);
    }
    if (!old) return select(index, "down");
    const { slices } = rows[old.row];
    const slice = slices[slices.indexOf(old.slice) + (name === "next" ? 1 : -1)];
    return slice && show(index, old.row, slice);
  }

  // Choose a slice by a key, and move until it is seen.
  function show(index, row, slice) {
    state.slice = { panel: index, row, slice };
    const { begin } = partAt(index);
    const { from, span } = state.view;
    const isSeen = slice.end - begin >= from && slice.start - begin <= from + span;
    if (!isSeen) state.view = zoomed({ from: slice.start - begin - span / 2, span }, limits(), 1);
    redraw();
  }

  // The innermost slice under the pointer, or the nearest one beside it.
  function point(index, clientX, clientY) {
    const svg = panels[index].picture.querySelector("svg");
    if (!svg) return;
    const { left, top, width } = svg.getBoundingClientRect();
    const [x, y] = [clientX - left, clientY - top];
    const { rows } = layRows(traceOf(index));
    const row = rows.findIndex((each) => y >= each.y - 1 && y <= each.y + each.height + 1);
    if (row < 0) return;
    const scale = scaleOf(state.view, partAt(index).begin, width);
    const away = ({ start, end }) => Math.max(0, scale.x(start) - x, x - scale.x(end));
    let nearest;
    for (const slice of rows[row].slices) {
      if (away(slice) <= REACH && (!nearest || away(slice) <= away(nearest))) nearest = slice;
    }
    if (!nearest || nearest === state.slice?.slice) return;
    state.slice = { panel: index, row, slice: nearest };
    redraw();
  }

  // ---- what is shown ------------------------------------------------------------------------------------------------

  let isDue = false;
  function redraw() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      drawBoth();
    });
  }

  function drawBoth() {
    for (const index of [0, 1]) {
      const { id, side, picture, note } = panels[index];
      const trace = traceOf(index);
      picture.hidden = !trace;
      note.hidden = !trace || !state.arrows;
      if (!trace) continue;
      const width = Math.max(260, Math.floor(picture.clientWidth));
      const { begin } = partAt(index);
      const chosen = state.slice?.panel === index ? state.slice : undefined;
      picture.replaceChildren(drawTrace(trace, { id, origin: begin, view: state.view, width, colours, chosen,
        unit: unitOf(state.view.span), arrows: state.arrows, label: `timeline ${side}` }));
      if (state.arrows) note.textContent = arrowsOf(trace, scaleOf(state.view, begin, width)).words;
    }
    const entries = Object.entries(colours).map(([name, colour]) => [legendOf(name), colour]);
    colourWords.replaceChildren(legend(entries), element("p", {}, "Grey in a rank's first row: it does not compute. "
      + "Faint and hatched: it waits for messages. Dotted: where steps begin and end."));
    if (!state.slice) details.replaceChildren("No bar is chosen.");
    else {
      const { panel, row, slice } = state.slice;
      details.replaceChildren(...sliceWords(traceOf(panel), layRows(traceOf(panel)).rows[row], slice,
        partAt(panel).begin));
    }
  }

  function update() {
    const options = [...known].map(([name, { words }]) => [name, words]);
    panels.forEach(({ select: chooser }, index) => {
      const empty = index === 0 ? [] : [option(NOTHING, "nothing")];
      chooser.replaceChildren(...empty, ...options.map(([name, words]) => option(name, words)));
      chooser.value = state.chosen[index];
    });
    const most = Math.max(1, ...shown().map((index) => stepsOf(traceOf(index)).length));
    const numbers = Array.from({ length: most }, (_, k) => option(String(k + 1), `step ${k + 1}`));
    parts.replaceChildren(option("last", "the last step"), option("all", "all steps"), ...numbers);
    const isThere = [...parts.options].some(({ value }) => value === state.part);
    parts.value = isThere ? state.part : "last";
    for (const index of [0, 1]) {
      const { words, shares } = panels[index];
      const trace = traceOf(index);
      words.replaceChildren(...(trace ? [summary(trace, partAt(index))] : []));
      const name = known.get(state.chosen[index])?.words;
      shares.hidden = !trace;
      shares.replaceChildren(...(trace ? [heading(name), sharesTable(trace, partAt(index))] : []));
    }
    colours = coloursOf(shown().flatMap((index) => namesIn(traceOf(index))));
    compared.replaceChildren(...(shown().length === 2 ? [comparison(partAt(0), partAt(1))] : []));
    drawBoth();
  }

  const button = (words, name, act) => {
    const made = element("button", { type: "button", "aria-label": name, title: name }, words);
    made.addEventListener("click", act);
    return made;
  };
  const controls = element("div", { class: "player-controls" },
    labelled("show ", parts), button("+", "zoom in", MOVES.in), button("−", "zoom out", MOVES.out),
    button("←", "move left", MOVES.left), button("→", "move right", MOVES.right),
    button("fit", "show everything", fit),
    element("label", {}, arrows, " messages as arrows"));
  parts.addEventListener("input", () => {
    state.part = parts.value;
    fit();
    remember();
  });
  arrows.addEventListener("input", () => {
    state.arrows = arrows.checked;
    drawBoth();
  });
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) open(1, event.dataTransfer.files[0]);
  });
  const help = element("p", { class: "trace-help", id: "trace-help" }, HELP);
  place.replaceChildren(controls, help, compared, ...panels.map(({ body }) => body), details, colourWords,
    element("div", { class: "trace-shares" }, ...panels.map(({ shares }) => shares)));
  restore();
  window.addEventListener("hashchange", restore);
  new ResizeObserver(redraw).observe(place);
}

if (typeof document !== "undefined") document.querySelectorAll(".trace-viewer").forEach(openViewer);
