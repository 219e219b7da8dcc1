"use strict";

// Elements and number formats. Text goes only into text nodes: what a tool or a model wrote is never markup.

/** Create an element. `attributes`: `on` has listeners by event, `data` has data attributes; null omits one. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "data") {
      Object.assign(element.dataset, value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Says that something is being loaded. */
function loadingSign(what) {
  return make("p", { class: "loading", role: "status" }, make("span", { class: "spinner", "aria-hidden": "true" }), `Loading ${what} …`);
}

/** The same, with the outlines of the charts to come. */
function loadingCards() {
  const cards = Array.from({ length: 6 }, () => make("div", { class: "card outline" }));
  return [loadingSign("curves"), make("div", { class: "charts", "aria-hidden": "true" }, ...cards)];
}

/** A number for people: four digits, or a dash for none. */
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** The next number that is 1, 2 or 5 times a power of ten. */
function roundAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= value * (1 - 1e-9)) ?? 10 * power;
}

/** A coloured square that represents a run. */
function swatch(run) {
  const square = make("span", { class: "swatch" });
  square.style.background = colourOf(run);
  return square;
}

const COLOURS = ["#3f74d1", "#d9772b", "#2f9a72", "#b3478f", "#7a5fc7", "#a8932b", "#2f9bb0", "#c24e45", "#6c7888", "#8a6a3d"];
const coloured = [];

/** The colour of a run, which its stages share; it does not change when other runs are added. */
function colourOf(id) {
  const folder = lastState?.runs.find((run) => run.id === id)?.folder ?? id;
  if (!coloured.includes(folder)) coloured.push(folder);
  return COLOURS[coloured.indexOf(folder) % COLOURS.length];
}

const DASHES = ["solid", "dash", "dashdot", "longdash"];

/** The dash of a stage's lines, which tells it from the run's other stages of the same kind. */
function dashOf({ id, folder, supervised }) {
  const stages = lastState.runs.filter((run) => run.folder === folder && run.supervised === supervised);
  return DASHES[stages.findIndex((run) => run.id === id) % DASHES.length];
}

/** The value of a style sheet variable; it depends on light or dark mode. */
function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Call `action` once, `milliseconds` after the last of several calls. */
function later(milliseconds, action) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}

const tip = document.getElementById("tip");

/** Show `content` next to the pointer, or below the element that has the focus; null hides it. */
function showTip(content, event) {
  tip.hidden = content === null;
  if (content === null) return;
  tip.replaceChildren(content);
  const { innerWidth, innerHeight } = window;
  const box = event.target.getBoundingClientRect();
  const [x, y] = event.clientX === undefined ? [box.left, box.bottom - 12] : [event.clientX, event.clientY];
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const below = y + 18;
  const top = below + tip.offsetHeight < innerHeight ? below : y - tip.offsetHeight - 10;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
