// How one moves in time: a view is {from, span} in seconds; keys, the wheel, dragging and two fingers change it.

import { LABELS, MARGIN } from "./trace_rows.js";

const CLOSEST = 1e-7; // seconds: the clocks of traces tell no less
const PER_TURN = 0.002; // of the logarithm of the zoom, for a pixel of the wheel

// Take part of a view, or more than it; `at` is the place that stays, from 0 (left) to 1 (right).
export function zoomed(view, limits, factor, at = 0.5) {
  const span = Math.min(Math.max(view.span * factor, CLOSEST), limits.to - limits.from);
  return within({ from: view.from + at * (view.span - span), span }, limits);
}

// Move by a share of what is seen.
export const panned = (view, limits, share) => within({ ...view, from: view.from + share * view.span }, limits);

function within({ from, span }, limits) {
  return { from: Math.max(limits.from, Math.min(from, limits.to - span)), span };
}

const KEYS = {
  "+": "in", "=": "in", "-": "out", _: "out", 0: "fit", Home: "fit", ArrowLeft: "left", ArrowRight: "right",
  ArrowUp: "up", ArrowDown: "down", ",": "previous", ".": "next",
};

// Listen to all that one does in an element with a picture. `act` has zoom(factor, at), pan(share), point(x, y) and
// key(name).
export function listen(place, act) {
  const down = new Map(); // pointers
  const plot = () => {
    const { left, width } = place.getBoundingClientRect();
    return { left: left + LABELS, width: width - LABELS - MARGIN };
  };
  const shareAt = (x) => Math.min(1, Math.max(0, (x - plot().left) / plot().width));
  const spread = () => {
    const [one, other] = [...down.values()];
    return { distance: Math.max(20, Math.abs(one - other)), middle: (one + other) / 2 };
  };
  place.addEventListener("keydown", (event) => {
    const name = KEYS[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act.key(name);
  });
  place.addEventListener("wheel", (event) => {
    const isZoom = event.ctrlKey || event.metaKey;
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isZoom && !isSideways) return; // the page scrolls
    event.preventDefault();
    if (isZoom) act.zoom(Math.exp(event.deltaY * PER_TURN), shareAt(event.clientX));
    else act.pan(event.deltaX / plot().width);
  }, { passive: false });
  place.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, event.clientX);
    act.point(event.clientX, event.clientY);
    place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) return act.point(event.clientX, event.clientY);
    const before = down.size === 2 ? spread() : undefined;
    const moved = event.clientX - down.get(event.pointerId);
    down.set(event.pointerId, event.clientX);
    if (!before) return act.pan(-moved / plot().width);
    const { distance, middle } = spread();
    return act.zoom(before.distance / distance, shareAt(middle));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    place.addEventListener(end, (event) => down.delete(event.pointerId));
  }
}
