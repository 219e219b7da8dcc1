"use strict";

// A chain as a film strip: for each action the picture that the model saw before it, with the places where it acted.

/** A frame for each call, in order, and one for the last picture: {picture, call, turn}; picture is null before the
    first one. None if the chain has no pictures, or no calls. */
function framesOf(messages) {
  const frames = [];
  let picture = null;
  for (const message of messages) {
    for (const call of message.calls) frames.push({ picture, call, turn: message.turn });
    picture = message.parts.findLast((part) => part.image) ?? picture;
  }
  if (!frames.length || !picture) return [];
  return picture === frames.at(-1).picture ? frames : [...frames, { picture, call: null, turn: null }];
}

/** A call in one line: its name and arguments as the model stated them. */
function callLine({ name, arguments: given }) {
  const values = given !== null && typeof given === "object" ? Object.values(given) : [given];
  return `${name}(${values.map((value) => JSON.stringify(value)).join(", ")})`;
}

/** The strip; `choose(turn)` is called for a frame that is clicked. */
function filmStrip(frames, choose) {
  return make("ol", { class: "film" }, ...frames.map(({ picture: shown, call, turn }) => {
    const spoken = turn !== null && turn >= 0;
    const inside = [
      shown ? make("div", { class: "picture" }, make("img", { src: shown.image, alt: "", loading: "lazy" }), ...placeMarks(call?.places ?? []))
        : make("div", { class: "unseen" }, "no picture yet"),
      make("span", { class: "frame-call", title: call ? callLine(call) : null }, call ? callLine(call) : "the last picture"),
    ];
    return make("li", {}, spoken ? make("button", { on: { click: () => choose(turn) } }, ...inside) : make("div", { class: "frame" }, ...inside));
  }));
}

/** Rings around places of a picture; where a drag begins is hollow. */
function placeMarks(places) {
  return places.map(([x, y], number) => {
    const mark = make("span", { class: number < places.length - 1 ? "place from" : "place" });
    Object.assign(mark.style, { left: `${100 * x}%`, top: `${100 * y}%` });
    return mark;
  });
}
