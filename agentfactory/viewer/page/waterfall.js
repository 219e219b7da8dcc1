"use strict";

// A chain's time: the share of each activity, and every stretch of it on one axis, turn by turn.

const ACTIVITIES = {
  // by precedence: of several things at the same moment, the first one counts
  tool: { label: "tools", about: "A call ran." },
  model: { label: "model", about: "The server sampled: from the request to the answer, its queue included." },
  reward: { label: "reward", about: "The rewards judged the chain." },
  teacher: { label: "teacher", about: "The server of the teacher graded the chain's tokens, its queue included." },
  wait: { label: "waiting", about: "Waited for an instance of a tool server, or for limits.calls_per_second." },
  held: { label: "held", about: "A turn waited for room in the servers' caches (rollout.concurrency: auto)." },
  setup: { label: "setup", about: "The environments were reset, and instances waited for." },
  rest: { label: "rest", about: "None of the others: rendering and parsing of turns, and other chains of the same process." },
};
const IN_ORDER = ["setup", "wait", "held", "model", "tool", "reward", "teacher", "rest"];
const MOST_ROWS = 400;

/** Seconds for people. */
function seconds(value) {
  if (value >= 100) return `${Math.round(value).toLocaleString("en")} s`;
  return value >= 0.1 ? `${Number(value.toPrecision(3))} s` : `${Number((value * 1000).toPrecision(2))} ms`;
}

/** Seconds of each activity; a moment counts once, however many calls run in it. */
function timeShares(timeline, total) {
  const edges = timeline.flatMap(({ activity, start, end }) => [[start, activity, 1], [end, activity, -1]]).sort((a, b) => a[0] - b[0]);
  const order = Object.keys(ACTIVITIES);
  const running = Object.fromEntries(order.map((name) => [name, 0]));
  const spent = { ...running };
  let since = 0;
  for (const [moment, activity, change] of edges) {
    spent[order.find((name) => running[name] > 0) ?? "rest"] += moment - since;
    since = moment;
    running[activity] += change;
  }
  spent.rest += Math.max(0, total - since);
  return spent;
}

/** Seconds for a column, all in the unit and with the digits that suit the whole. */
function columnOf(total) {
  const [unit, factor] = total >= 1 ? ["s", 1] : ["ms", 1000];
  const digits = Math.min(3, Math.max(0, 3 - Math.floor(Math.log10(Math.max(total * factor, 1e-9)))));
  return { unit, factor, text: (value) => (value * factor).toFixed(digits) };
}

/** Round numbers of seconds on an axis of this length. */
function ticksOf(total) {
  if (!(total > 0)) return [];
  const step = roundAbove(total / 5);
  const ticks = [];
  for (let number = 0; number * step <= total * 1.0001; number++) ticks.push(Number((number * step).toPrecision(6)));
  return ticks;
}

/** The bar of shares, with its legend. */
function sharesBar(spent) {
  const total = Object.values(spent).reduce((sum, value) => sum + value, 0);
  const shown = IN_ORDER.map((name) => [name, spent[name]]).filter(([, value]) => value > total * 1e-4);
  const share = (value) => `${figure(Number(((100 * value) / total).toPrecision(2)))} %`;
  const parts = shown.map(([name, value]) => {
    const part = make("span", { class: `stretch ${name}` });
    part.style.width = `${(100 * value) / total}%`;
    return part;
  });
  return [
    make("div", { class: "shares", "aria-hidden": "true" }, ...parts),
    make("dl", { class: "share-list" }, ...shown.map(([name, value]) => make("div", { title: ACTIVITIES[name].about },
      make("dt", {}, make("span", { class: `swatch stretch ${name}` }), ACTIVITIES[name].label),
      make("dd", {}, seconds(value), " ", make("span", { class: "unit" }, share(value)))))),
  ];
}

/** The rows: the setup, then each turn's model and each of its calls, then the reward. */
function waterfallRows(timeline) {
  const sorted = [...timeline].sort((a, b) => a.start - b.start);
  const outside = sorted.filter(({ turn }) => turn === null);
  const row = (label, stretches, more = {}) => ({ label, stretches, ...more });
  const rows = [];
  const ending = ["reward", "teacher"];
  const setup = outside.filter(({ activity }) => !ending.includes(activity));
  if (setup.length) rows.push(row("setup", setup.sort((a, b) => (a.activity === "wait") - (b.activity === "wait"))));
  const turns = new Map();
  for (const stretch of sorted) {
    if (stretch.turn === null) continue;
    if (!turns.has(stretch.turn)) turns.set(stretch.turn, []);
    turns.get(stretch.turn).push(stretch);
  }
  for (const [turn, stretches] of [...turns].sort(([a], [b]) => a - b)) {
    rows.push(row(`turn ${turn + 1}`, stretches.filter(({ activity }) => ["held", "model"].includes(activity)), { turn }));
    const waits = stretches.filter(({ activity }) => activity === "wait");
    for (const call of stretches.filter(({ activity }) => activity === "tool")) {
      // a wait ends when its call begins
      const at = waits.findIndex(({ name, end }) => name === call.name && Math.abs(end - call.start) < 0.0005);
      rows.push(row(call.name, [...(at < 0 ? [] : waits.splice(at, 1)), call], { turn, call: true }));
    }
    for (const wait of waits) rows.push(row(wait.name, [wait], { turn, call: true }));
  }
  for (const name of ending) {
    const stretches = outside.filter(({ activity }) => activity === name);
    if (stretches.length) rows.push(row(name, stretches));
  }
  return rows;
}

class Waterfall {
  /** `onTurn` is called with the number of a turn that somebody wants to read. */
  constructor({ timeline, facts, metrics }, onTurn) {
    this.onTurn = onTurn;
    this.total = (timeline ?? []).reduce((most, { end }) => Math.max(most, end), facts.seconds ?? 0);
    const title = make("h3", {}, "Time", make("span", { class: "unit" }, `${seconds(this.total)} in all`));
    if (!timeline?.length) {
      this.element = make("section", { class: "panel", id: "time" }, title, ...this.untold(timeline, metrics));
      return;
    }
    this.rows = waterfallRows(timeline);
    this.column = columnOf(this.total);
    this.body = make("tbody");
    this.more = make("div", { class: "pager" });
    this.element = make("div", { id: "time" },
      make("section", { class: "panel" }, title, ...sharesBar(timeShares(timeline, this.total))),
      make("section", { class: "panel" },
        make("h3", {}, "Turn by turn", make("span", { class: "unit" }, "choose a turn to read it")),
        this.table = make("table", { class: "waterfall" },
          make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "what"), make("th", { scope: "col", class: "lane" }, this.axis()),
            make("th", { scope: "col", class: "figure" }, `took, ${this.column.unit}`))),
          this.body),
        this.more));
    this.table.style.setProperty("--tick", `${(100 * (ticksOf(this.total)[1] ?? this.total)) / this.total}%`);
    this.element.addEventListener("mousemove", (event) => this.tell(event));
    this.element.addEventListener("mouseleave", () => showTip(null));
    this.write();
  }

  /** What there is to say of a trajectory without times of its turns. */
  untold(timeline, metrics) {
    const spent = Object.fromEntries(Object.keys(ACTIVITIES).map((name) => [name, 0]));
    spent.tool = Math.min(this.total, metrics.tool_seconds ?? 0);
    spent.rest = this.total - spent.tool;
    const why = timeline
      ? "The chain ended before its first turn: nothing in it was timed."
      : "This trajectory has no times of its turns: it was saved before they were recorded. The time of its tools is known as a whole; the rest is the model, waiting, and everything else.";
    return [...(this.total > 0 ? sharesBar(spent) : []), make("p", { class: "note" }, why)];
  }

  axis() {
    return make("div", { class: "axis", "aria-hidden": "true" }, ...ticksOf(this.total).map((tick) => {
      const label = make("span", { class: tick === 0 ? "first" : null }, figure(Number((tick * this.column.factor).toPrecision(6))));
      label.style.left = `${(100 * tick) / this.total}%`;
      return label;
    }));
  }

  /** Write the next rows: a chain may have thousands. */
  write() {
    const from = this.body.children.length;
    this.body.append(...this.rows.slice(from, from + MOST_ROWS).map((row) => this.row(row)));
    const left = this.rows.length - this.body.children.length;
    this.more.hidden = left <= 0;
    this.more.replaceChildren(...(left > 0
      ? [make("button", { on: { click: () => this.write() } }, `show ${figure(Math.min(left, MOST_ROWS))} more rows of ${figure(left)}`)]
      : []));
  }

  row({ label, stretches, turn, call }) {
    const bars = stretches.map((stretch) => {
      const { activity, name, start, end } = stretch;
      const bar = make("span", { class: `stretch ${activity}`, role: "img",
        "aria-label": `${ACTIVITIES[activity].label}${name ? `, ${name}` : ""}: ${seconds(end - start)}, from ${seconds(start)}` });
      bar.style.left = `${(100 * start) / this.total}%`;
      bar.style.width = `${(100 * (end - start)) / this.total}%`;
      bar.stretch = stretch;
      return bar;
    });
    const name = call || turn === undefined ? label
      : make("button", { class: "quiet", on: { click: () => this.onTurn(turn) } }, label);
    const spent = stretches.length ? Math.max(...stretches.map(({ end }) => end)) - Math.min(...stretches.map(({ start }) => start)) : null;
    return make("tr", { class: call ? "call-row" : "turn-row" }, make("th", { scope: "row", title: call ? label : null }, name),
      make("td", { class: "lane" }, make("div", { class: "bars" }, ...bars)),
      make("td", { class: "figure" }, spent === null ? "–" : this.column.text(spent)));
  }

  tell(event) {
    const { stretch } = event.target;
    if (!stretch) return showTip(null);
    const { activity, name, start, end } = stretch;
    const facts = [[ACTIVITIES[activity].label, name], ["took", seconds(end - start)], ["from", seconds(start)], ["to", seconds(end)]];
    return showTip(make("div", {}, make("dl", { class: "facts" }, ...facts.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)])),
      make("div", { class: "note" }, ACTIVITIES[activity].about)), event);
  }
}
