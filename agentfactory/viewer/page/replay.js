"use strict";

// What `agentfactory replay` has found out about a chain, and its commands.

/** A text for a shell. */
function quoted(text) {
  return /^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A command with a button that copies it. The viewer runs nothing itself: a recipe's code is the user's to start. */
function commandBox(command) {
  const button = make("button", { type: "button", on: { click: async () => {
    await navigator.clipboard?.writeText(command).catch(() => null);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } } }, "copy");
  return make("div", { class: "command" }, make("pre", {}, command), button);
}

/** The button of a turn: shows the command that samples what would have followed. */
function replayButton(path, chain, turn) {
  const box = make("div", { hidden: true }, make("p", { class: "note" },
    "Samples continuations from before this turn. Add --action, --result, --checkpoint or --system to change one thing; the results then appear here."),
  commandBox(`agentfactory replay ${quoted(path)} ${quoted(chain)} --turn ${turn + 1}`));
  const button = make("button", { type: "button", class: "quiet replay", "aria-expanded": "false", on: { click: () => {
    box.hidden = !box.hidden;
    button.setAttribute("aria-expanded", String(!box.hidden));
  } } }, "what if?");
  return [button, box];
}

/** The effect of a turn on the expected result, from the last ranking; null if there is none. */
function effectOf(replays, turn) {
  const ranking = replays.filter(({ turns }) => Array.isArray(turns)).at(-1);
  return ranking?.turns.find((one) => one.turn === turn + 1)?.effect ?? null;
}

/** A panel with the results of all replays of a chain; null if there is none. */
function replayPanel(replays, path, chain) {
  const interval = (found) => (Array.isArray(found.interval) ? ` [${found.interval.map((bound) => bound.toFixed(2)).join(", ")}]` : "");
  const told = (found) => `${found.figure} ${Number(found.mean).toFixed(2)}${interval(found)}, ${found.chains} continuations`;
  const entries = replays.flatMap((replay) => (Array.isArray(replay.turns)
    ? [["turns by effect", replay.turns.map(({ turn, effect }) => `${turn}: ${effect >= 0 ? "+" : "−"}${Math.abs(effect).toFixed(2)}`).join(", ")]]
    : Object.entries(replay.results ?? {}).map(([name, found]) => [`turn ${replay.turn}, ${name}`, told(found)])));
  return make("section", { class: "panel", id: "replays" }, make("h3", {}, "What if?"),
    entries.length ? make("dl", { class: "facts" }, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])) : null,
    path ? make("details", { open: !entries.length }, make("summary", {}, "rank the turns"),
      commandBox(`agentfactory replay ${quoted(path)} ${quoted(chain)}`)) : null);
}
