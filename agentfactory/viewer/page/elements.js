"use strict";

// Elements and how figures are written. Text goes into text nodes only: what a tool or a model wrote is never markup.

/** Make an element. `attributes`: `on` has listeners by event, `data` has data attributes; null leaves one out. */
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

/** A figure as people read it: four digits, and a dash for none. */
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** A coloured square that stands for a run. */
function swatch(run) {
  const square = make("span", { class: "swatch" });
  square.style.background = colourOf(run);
  return square;
}

const COLOURS = ["#3f74d1", "#d9772b", "#2f9a72", "#b3478f", "#7a5fc7", "#a8932b", "#2f9bb0", "#c24e45", "#6c7888", "#8a6a3d"];
const coloured = [];

/** The colour of a run, which it keeps when others join. */
function colourOf(run) {
  if (!coloured.includes(run)) coloured.push(run);
  return COLOURS[coloured.indexOf(run) % COLOURS.length];
}

/** Value of a variable of the style sheet, which knows of light and dark. */
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

/** Show `content` beside the pointer; null hides it. */
function showTip(content, event) {
  tip.hidden = content === null;
  if (content === null) return;
  tip.replaceChildren(content);
  const { innerWidth, innerHeight } = window;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const top = below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 10;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
