// What check.mjs asks of an open page. Each function runs in the browser and refers to nothing outside of itself; it
// returns sentences about what is wrong.

// What is wrong with the content of the page.
export function contentFaults() {
  const found = [];
  for (const image of document.querySelectorAll("img")) {
    if (!image.complete || !image.naturalWidth) found.push(`picture ${image.src} does not load`);
    const isSentence = image.alt.trim().split(/\s+/).length >= 3 && !image.alt.includes("_images/");
    if (!isSentence) found.push(`picture ${image.src}: "${image.alt}" does not say what it shows`);
  }
  const errors = document.querySelectorAll("mjx-merror, .math:not(:has(mjx-container))");
  for (const formula of errors) found.push(`formula not rendered: ${formula.textContent.slice(0, 80)}`);
  // Text outside of code with $...$ or TeX commands is a formula that was not recognized.
  const article = document.querySelector("article") ?? document.body;
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    if (parentElement.closest("pre, code, script, style, mjx-container")) continue;
    if (/\$[^$\n]+\$|\\(frac|sum|cdot|times|left|begin|text)\b/.test(data)) {
      found.push(`raw TeX: ${data.trim().slice(0, 80)}`);
    }
  }
  for (const box of document.querySelectorAll("pre")) {
    const text = box.textContent;
    if (/\[(stdout|output):\d+\]/.test(text)) found.push(`an engine's mark: ${text.slice(0, 60)}`);
  }
  return found;
}

// What is cut at this width: code, tables, formulas and pictures whose right part can neither be seen nor be reached by
// a bar that shows. A bar that shows takes room, so an element that scrolls is higher than its inside.
export function cutFaults() {
  const found = [];
  const [root] = [document.documentElement];
  if (root.scrollWidth > window.innerWidth) {
    found.push(`the page is ${root.scrollWidth} pixels wide on a screen of ${window.innerWidth}`);
  }
  const hasBar = (element) => {
    const style = getComputedStyle(element);
    const edges = parseFloat(style.borderTopWidth) + parseFloat(style.borderBottomWidth);
    return ["auto", "scroll"].includes(style.overflowX) && element.offsetHeight - element.clientHeight - edges >= 6;
  };
  for (const element of document.querySelectorAll("article :is(pre, table, div.math, svg.explorer-picture, img)")) {
    const area = element.getBoundingClientRect();
    if (!area.width || !area.height) continue; // hidden
    const inner = element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0;
    let isCut = inner && !hasBar(element) && getComputedStyle(element).overflowX !== "visible";
    let outside = Math.max(area.right, inner && !hasBar(element) ? area.left + element.scrollWidth : 0);
    for (let around = element.parentElement; around && around !== document.body; around = around.parentElement) {
      const bounds = around.getBoundingClientRect();
      const clips = getComputedStyle(around).overflowX !== "visible";
      if (!clips || outside <= bounds.right + 1) continue;
      if (!hasBar(around)) isCut = true;
      outside = bounds.right;
      if (hasBar(around)) break;
    }
    const words = (element.textContent || element.alt || "").trim().slice(0, 60);
    if (isCut) found.push(`${element.tagName.toLowerCase()} is cut: ${words}`);
  }
  return found;
}

// Marks of pictures in SVG that differ too little from the page: neither their fill nor their edge has contrast 3. Text
// is compared with the box on which it stands.
export function contrastFaults() {
  const found = new Set();
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const contrast = (one, other) => {
    const [low, high] = [luminance(rgb(one)), luminance(rgb(other))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const background = (element) => {
    for (let around = element; around; around = around.parentElement) {
      const colour = getComputedStyle(around).backgroundColor;
      if (rgb(colour)[3] === 255) return colour;
    }
    return "white";
  };
  for (const svg of document.querySelectorAll("article svg:is(.explorer-picture, .map)")) {
    const page = background(svg);
    const boxes = [...svg.querySelectorAll("rect")].map((rect) => [rect.getBoundingClientRect(), rect]);
    for (const mark of svg.querySelectorAll("rect, path, line, circle, polygon")) {
      if (mark.closest("defs, .grid, .idle")) continue;
      const { fill, stroke } = getComputedStyle(mark);
      const colours = [fill, stroke].filter((colour) => colour !== "none" && rgb(colour)[3]);
      if (mark.tagName === "rect" && mark.getAttribute("fill") === "#222222") continue; // a bar on its own box
      if (colours.length && !colours.some((colour) => contrast(colour, page) >= 3)) {
        found.add(`${mark.tagName} ${fill} ${stroke} on ${page} in "${svg.getAttribute("aria-label")}"`);
      }
    }
    for (const text of svg.querySelectorAll("text")) {
      const area = text.getBoundingClientRect();
      const [x, y] = [(area.left + area.right) / 2, (area.top + area.bottom) / 2];
      const under = boxes.filter(([b]) => b.left <= x && x <= b.right && b.top <= y && y <= b.bottom).pop();
      const fill = under ? getComputedStyle(under[1]).fill : page;
      const paper = fill === "none" ? page : fill;
      if (contrast(getComputedStyle(text).fill, paper) < 3) found.add(`text "${text.textContent}" on ${paper}`);
    }
  }
  return [...found];
}

// Controls of the explorers that change nothing, whatever the other choices are; and forms that accept what cannot be.
export function controlFaults() {
  const found = [];
  for (const form of document.querySelectorAll(".explorer-form")) {
    const place = form.parentElement;
    const result = place.querySelector(".explorer-result");
    const shown = () => result.innerHTML + (place.querySelector(".explorer-head")?.innerHTML ?? "");
    const problem = place.querySelector(".explorer-problem");
    const tell = (input) => input.dispatchEvent(new Event("input", { bubbles: true }));
    const values = (input) => {
      if (input.tagName === "SELECT") return [...input.options].map((option) => option.value);
      if (input.type === "range") return [input.min, input.max, String(Number(input.value) + 1), "1", "2", "3"];
      return [input.min || "1", "3", "7", "12", "16384"];
    };
    const put = (input, value) => {
      if (input.type === "checkbox") input.checked = value;
      else input.value = value;
      tell(input);
    };
    const changes = (input) => {
      const before = shown();
      if (input.type === "checkbox") {
        put(input, !input.checked);
        const changed = shown() !== before;
        put(input, !input.checked);
        return changed;
      }
      const old = input.value;
      const changed = values(input).some((value) => {
        put(input, value);
        return shown() !== before;
      });
      put(input, old);
      return changed;
    };
    if (!result.querySelector("svg")) found.push(`the ${place.id} draws nothing`);
    const inputs = [...form.elements].filter((input) => input.name);
    for (const input of inputs) {
      let acts = changes(input);
      for (const other of inputs.filter((each) => each !== input && ["select-one", "range"].includes(each.type))) {
        if (acts) break;
        const old = other.value;
        for (const value of values(other)) {
          put(other, value);
          acts ||= !input.closest("label").hidden && changes(input);
          if (acts) break;
        }
        put(other, old);
      }
      if (!acts) found.push(`${place.id}: ${input.name} does nothing`);
      if (input.type === "number") {
        const old = input.value;
        put(input, "-1");
        const isShown = !input.closest("label").hidden;
        if (!problem.textContent && isShown) found.push(`${place.id} accepts ${input.name} = -1`);
        put(input, old);
      }
    }
    for (const button of place.querySelectorAll(".explorer-presets button, .explorer-result td button")) {
      const state = () => shown() + window.location.hash;
      const before = state();
      button.click();
      if (state() === before && !("start" in button.dataset)) found.push(`${button.textContent} does nothing`);
      if (problem.textContent) found.push(`${button.textContent}: ${problem.textContent}`);
    }
  }
  return found;
}

// What is wrong with the viewer of traces: controls that do nothing, a trace that is dropped and not shown, and another
// file that is not refused in one line.
export async function traceFaults() {
  const found = [];
  const place = document.querySelector(".trace-viewer");
  if (!place) return found;
  const drawn = () => new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
  const acts = async (what, act) => {
    await drawn();
    const before = place.innerHTML;
    act();
    await drawn();
    if (place.innerHTML === before) found.push(`${what} does nothing`);
  };
  const put = (control, value) => () => {
    if (control.type === "checkbox") control.checked = value;
    else control.value = value;
    control.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const drop = async (panel, text) => {
    const files = new DataTransfer();
    files.items.add(new File([text], "dropped.json"));
    panel.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
    await new Promise((next) => setTimeout(next, 500));
  };
  const [above, below] = place.querySelectorAll(".trace-panel");
  const [first, second] = place.querySelectorAll(".trace-panel select");
  await acts("the arrows' box", put(place.querySelector("input[type=checkbox]"), true));
  await acts("the choice of a step", put(place.querySelector("select"), "all"));
  for (const select of [first, second]) {
    for (const { value } of [...select.options].slice(1)) await acts(`${select.name} = ${value}`, put(select, value));
  }
  for (const button of place.querySelectorAll("button")) {
    const nearer = place.querySelector("button");
    if (button !== nearer) nearer.click();
    await acts(button.title, () => button.click());
  }
  // A view of everything cannot be moved, and a row's last slice has none after it.
  for (const key of ["+", "ArrowRight", "ArrowLeft", "-", "+", "0", "ArrowDown", "ArrowDown", "ArrowUp", ",", "."]) {
    const press = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
    await acts(`the key ${key}`, () => above.querySelector(".trace-rows").dispatchEvent(press));
  }
  const lane = { ph: "M", name: "thread_name", pid: 7, tid: 0, args: { name: "computation" } };
  await drop(below, JSON.stringify([lane, { ph: "X", name: "F", pid: 7, tid: 0, ts: 0, dur: 5 }]));
  if (!below.textContent.includes("rank 7")) found.push("a trace that is dropped is not shown");
  for (const text of ["no JSON", "[]", '{"traceEvents": 3}']) {
    await drop(above, text);
    const line = above.querySelector("[role=alert]").textContent;
    if (!line.startsWith("dropped.json") || line.includes("\n")) found.push(`${text} is not refused in one line`);
  }
  return found;
}

// Animations that cannot be stopped, or do not run again.
export function animationFaults() {
  const found = [];
  for (const image of document.querySelectorAll('article img[src$=".gif"]')) {
    const button = image.parentElement.querySelector(".animation-button");
    if (!button) found.push(`${image.alt}: no button stops the animation`);
    for (const isHidden of button ? [true, false] : []) {
      button.click();
      if (image.hidden !== isHidden) found.push(`${image.alt}: its button does nothing`);
    }
  }
  return found;
}

// Buttons of the map and of the players that change nothing when they are pressed.
export function buttonFaults() {
  const found = [];
  for (const place of document.querySelectorAll("#map, .player")) {
    const buttons = [...place.querySelectorAll("button")];
    const selects = [...place.querySelectorAll("select, input")];
    if (!place.querySelector("svg")) found.push(`${place.id} draws nothing`);
    for (const button of buttons) {
      const before = place.innerHTML;
      button.click();
      const isPressed = before.includes(`aria-pressed="true">${button.textContent}<`);
      const acts = place.innerHTML !== before || isPressed || button.disabled;
      if (!acts) found.push(`${button.textContent} does nothing`);
    }
    for (const select of selects) {
      const before = place.innerHTML;
      const values = select.tagName === "SELECT" ? [...select.options].map((option) => option.value)
        : [select.min, select.max];
      const changed = values.some((value) => {
        select.value = value;
        select.dispatchEvent(new Event("input", { bubbles: true }));
        return place.innerHTML !== before;
      });
      if (!changed) found.push(`${select.name} does nothing`);
    }
  }
  return found;
}
