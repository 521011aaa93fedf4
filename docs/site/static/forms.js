// Forms of the explorers: each computes and draws again at every change, and keeps its state in the page's address.

import { element } from "./draw.js";

// A field of a form. whole: a number from least to most; real: the same with decimals; power: a slider over powers of
// two; choice; yes: a box to tick; lines: a text that starts as follows(settings), and again when that changes. `when`
// says for which settings a field is shown.
const always = () => true;
export const whole = (name, label, start, least, most, when = always) =>
  ({ type: "whole", name, label, start, least, most, when });
export const real = (name, label, start, least, most) =>
  ({ type: "real", name, label, start, least, most, when: always });
export const power = (name, label, start, most, when = always) => ({ type: "power", name, label, start, most, when });
export const choice = (name, label, options, start = options[0], when = always) =>
  ({ type: "choice", name, label, options, start, when });
export const yes = (name, label, start = false, when = always) => ({ type: "yes", name, label, start, when });
export const lines = (name, label, follows) => ({ type: "lines", name, label, start: "", follows, when: always });

function control({ type, name, least, most, options }) {
  if (type === "choice") {
    return element("select", { name }, ...options.map((option) => element("option", {}, String(option))));
  }
  if (type === "yes") return element("input", { name, type: "checkbox" });
  if (type === "lines") return element("textarea", { name, rows: 8, wrap: "off", spellcheck: "false" });
  if (type === "power") return element("input", { name, type: "range", min: 0, max: Math.log2(most), step: 1 });
  return element("input", { name, type: "number", min: least, max: most, step: type === "whole" ? 1 : "any" });
}

// Write a value into a field's control.
function write({ type }, input, value) {
  if (type === "yes") input.checked = value === true || value === "true";
  else if (type === "power") input.value = Math.log2(Number(value));
  else input.value = value;
}

// Read a field. An empty or impossible number is an error in words.
function read({ type, label, least, most }, input) {
  if (type === "yes") return input.checked;
  if (type === "choice" || type === "lines") return input.value;
  if (type === "power") return 2 ** Number(input.value);
  const number = input.value.trim() === "" ? NaN : Number(input.value);
  const fits = number >= least && number <= most && (type === "real" || Number.isInteger(number));
  const kind = type === "whole" ? "a whole number" : "a number";
  if (!fits) throw new Error(`${label} = ${input.value || "nothing"}: expected ${kind} from ${least} to ${most}`);
  return number;
}

// The settings that the page's address gives an explorer, such as #layout-explorer?tp=4.
function addressed(id) {
  const [place, query] = window.location.hash.slice(1).split("?");
  return place === id && query ? Object.fromEntries(new URLSearchParams(query)) : {};
}

// Build an explorer in the element `id`. show(settings, set) returns the elements to show, or throws an Error whose
// message is shown above what was there before; set({name: value}) changes fields, and with `anew` texts start again.
// A `headline` among the elements stands before the form, so that a small screen shows a result above the controls.
// `presets` are buttons with the values that they set: {words: values}. Return the form.
export function explorer(id, fields, show, presets = {}) {
  const place = document.getElementById(id);
  if (!place) return undefined;
  const inputs = Object.fromEntries(fields.map((field) => [field.name, control(field)]));
  const outputs = {};
  const labels = {};
  const form = element("form", { class: "explorer-form" });
  for (const { name, label, type } of fields) {
    const words = element("span", {}, label);
    if (type === "power") {
      outputs[name] = element("output", {});
      words.append(" ", outputs[name]);
    }
    labels[name] = element("label", {}, words, inputs[name]);
    form.append(labels[name]);
  }
  const problem = element("p", { class: "explorer-problem", role: "alert" });
  const head = element("div", { class: "explorer-head", "aria-live": "polite" });
  const result = element("div", { class: "explorer-result", "aria-live": "polite" });
  const set = (values) => {
    for (const field of fields) if (field.name in values) write(field, inputs[field.name], values[field.name]);
  };
  const readAll = () => Object.fromEntries(fields.map((field) => [field.name, read(field, inputs[field.name])]));
  const starts = {}; // of the texts that follow other fields
  const follow = (settings, brought) => {
    for (const field of fields.filter(({ follows }) => follows)) {
      const start = field.follows(settings);
      if (start !== starts[field.name] && !(field.name in brought)) inputs[field.name].value = start;
      starts[field.name] = start;
    }
  };
  const update = (brought = {}) => {
    for (const [name, output] of Object.entries(outputs)) {
      output.value = (2 ** inputs[name].value).toLocaleString("en-US");
    }
    try {
      const settings = readAll();
      for (const { name, when } of fields) labels[name].hidden = !when(settings);
      follow(settings, brought);
      const shown = show(readAll(), change);
      head.replaceChildren(...shown.filter(isSummary));
      result.replaceChildren(...shown.filter((item) => !isSummary(item)));
      problem.textContent = "";
    } catch (error) {
      problem.textContent = error.message;
    }
    for (const box of [head, result]) box.classList.toggle("explorer-old", problem.textContent !== "");
  };
  const remember = () => {
    const values = fields.map((field) => [field.name, field.type === "power"
      ? 2 ** inputs[field.name].value : field.type === "yes" ? inputs[field.name].checked : inputs[field.name].value]);
    const changed = fields.map(({ name, start }, index) => String(starts[name] ?? start) !== String(values[index][1]));
    const query = new URLSearchParams(values.filter((_, index) => changed[index]));
    window.history.replaceState(null, "", `#${id}?${query}`);
  };
  const change = (values, anew = false) => {
    if (anew) for (const name of Object.keys(starts)) delete starts[name];
    set(values);
    update();
    remember();
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => change({}));
  set(Object.fromEntries(fields.map(({ name, start }) => [name, start])));
  const brought = addressed(id);
  set(brought);
  const buttons = element("p", { class: "explorer-presets" });
  for (const [words, values] of Object.entries(presets)) {
    const isStart = fields.every(({ name, start }) => String(values[name] ?? start) === String(start));
    const button = element("button", { type: "button", ...(isStart ? { "data-start": "" } : {}) }, words);
    button.addEventListener("click", () => change(values, true));
    buttons.append(button, " ");
  }
  place.replaceChildren(...(Object.keys(presets).length ? [buttons] : []), head, form, problem, result);
  update(brought);
  return form;
}

const isSummary = (item) => item instanceof Element && item.classList.contains("explorer-summary");

// ---- words and tables -----------------------------------------------------------------------------------------------

const UNITS = [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]];

// Write bytes in powers of ten, as the papers do.
export function bytes(amount) {
  const [unit, size] = UNITS.find(([, least]) => amount >= least) ?? UNITS[UNITS.length - 1];
  return `${Number((amount / size).toPrecision(4))} ${unit}`;
}

// Whole numbers are written whole, others with five digits.
export const short = (number) =>
  (Number.isInteger(number) ? number : Number(number.toPrecision(5))).toLocaleString("en-US");
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function table(header, rows) {
  const content = (cell) => (cell instanceof Node ? cell : String(cell));
  const cells = (tag, row) => element("tr", {}, ...row.map((cell) => element(tag, {}, content(cell))));
  const body = element("tbody", {}, ...rows.map((row) => cells("td", row)));
  const all = element("table", { class: "table explorer-table" }, element("thead", {}, cells("th", header)), body);
  return element("div", { class: "scrolls" }, all);
}

export const headline = (...children) => element("div", { class: "explorer-summary" }, ...children);
export const paragraph = (...children) => element("p", {}, ...children);
export const strong = (words) => element("strong", {}, words);
export const heading = (words) => element("p", { class: "explorer-heading" }, words);
