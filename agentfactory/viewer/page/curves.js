"use strict";

// Curves: one plot per metric, with all runs.

const measured = new Map(); // run -> Metrics
const KINDS = {
  train: { label: "", symbol: "circle" },
  sampled: { label: "held-out, sampled", symbol: "circle" },
  greedy: { label: "held-out, greedy", symbol: "diamond-open" },
  rollout: { label: "rollout", symbol: "square" },
};
const TIME_PARTS = [
  ["seconds/wait", "waiting for chains", "#3f74d1"],
  ["seconds/sleep", "server to sleep", "#b9a9e8"],
  ["seconds/bring_in", "trainer in", "#7a5fc7"],
  ["seconds/update", "update", "#d9772b"],
  ["seconds/park", "trainer out", "#a8932b"],
  ["seconds/sync", "sync", "#2f9a72"],
];
const MOST_POINTS = 1200;
const SUPERVISED = "Supervised fine-tuning";

let plots = null;

/** Load the plotting library, which is large, only when curves are shown. */
function loadPlots() {
  plots ??= window.Plotly ? Promise.resolve() : new Promise((done, failed) => {
    document.head.append(make("script", { src: "plotly.js", on: {
      load: done,
      error: () => failed(new Error("plotly.js could not be loaded")),
    } }));
  });
  return plots;
}

/** A run's metrics by name, so that a chart costs only its own points, however many others there are. */
class Metrics {
  constructor(generation) {
    this.generation = generation;
    this.lines = 0;
    this.series = new Map(); // name -> {at: numbers of lines, y: values, lively: whether one is not 0}
    this.places = { step: [], tokens: [], hours: [] }; // of each line, on each axis
  }

  /** Add an answer of the source; what another answer has added meanwhile is left out. */
  add({ from, lines, series }) {
    const known = this.lines;
    if (from > known || lines <= known) return;
    for (const [name, { at, y }] of Object.entries(series)) {
      if (!this.series.has(name)) this.series.set(name, { at: [], y: [], lively: false });
      const mine = this.series.get(name);
      for (let i = at ? 0 : known - from; i < y.length; i++) {
        const line = at ? at[i] : from + i;
        if (line < known) continue;
        mine.at.push(line);
        mine.y.push(y[i]);
        if (y[i] !== 0) mine.lively = true;
      }
    }
    this.lines = lines;
    this.placeLines(known);
  }

  placeLines(known) {
    const { step, tokens, hours } = this.places;
    const [steps, counts, seconds] = ["step", "tokens", "seconds/step"].map((name) => this.byLine(name));
    for (let line = known; line < this.lines; line++) {
      step.push(steps[line] ?? line);
      tokens.push((tokens.at(-1) ?? 0) + (counts[line] ?? 0));
      hours.push((hours.at(-1) ?? 0) + (seconds[line] ?? 0) / 3600);
    }
  }

  /** The values of a metric, at the numbers of their lines. */
  byLine(name) {
    const values = [];
    const { at, y } = this.series.get(name) ?? { at: [], y: [] };
    at.forEach((line, i) => (values[line] = y[i]));
    return values;
  }

  /** The place of each line on an axis. Results without steps of their own are where `trained`, the metrics of the run
   * that made their checkpoint, ends the step; without such a run they have no place on the axes of tokens and hours. */
  placesBy(by, trained) {
    if (by === "step" || this.series.has("seconds/step")) return this.places[by];
    const ends = new Map();
    trained?.places.step.forEach((step, line) => ends.set(step, trained.places[by][line]));
    const steps = this.byLine("step");
    return Array.from({ length: this.lines }, (_, line) => (steps[line] ? ends.get(steps[line]) : 0));
  }

  /** The points of one line of a chart; `ends` has the interval of each point, or null if the line has none. */
  points({ name, per, low, high }, by, trained) {
    const places = this.placesBy(by, trained);
    const { at, y } = this.series.get(name) ?? { at: [], y: [] };
    const below = per === undefined ? null : this.byLine(per);
    const kept = at.map((line, i) => [line, y[i]]).filter(([line]) => places[line] !== undefined && (!below || below[line] > 0));
    const points = { x: kept.map(([line]) => places[line]), y: kept.map(([line, value]) => (below ? value / below[line] : value)) };
    if (low === undefined) return { points, ends: null };
    const [lows, highs] = [this.byLine(low), this.byLine(high)];
    return { points, ends: kept.map(([line]) => (lows[line] === undefined ? null : [lows[line], highs[line]])) };
  }
}

/** Get the new metrics of all runs; return whether there were any. */
async function takeMetrics(state) {
  const changed = await Promise.all(state.runs.map(async (run) => {
    const known = measured.get(run.id);
    if (known && known.generation === run.generation && known.lines >= run.lines) return false;
    const answer = await source.metrics(run.id, known?.lines ?? 0, known?.generation ?? 0);
    if (measured.get(run.id)?.generation !== answer.generation) measured.set(run.id, new Metrics(answer.generation));
    measured.get(run.id).add(answer);
    return true;
  }));
  return changed.includes(true);
}

/** Reduce to about MOST_POINTS: keep the lowest and highest point of each stretch, so that no peak is lost. */
function thinned({ x, y }) {
  if (x.length <= MOST_POINTS) return { x, y };
  const stretch = Math.ceil((2 * x.length) / MOST_POINTS);
  const kept = [];
  for (let start = 0; start < x.length; start += stretch) {
    const end = Math.min(start + stretch, x.length);
    let low = start;
    let high = start;
    for (let i = start; i < end; i++) {
      if (y[i] < y[low]) low = i;
      if (y[i] > y[high]) high = i;
    }
    kept.push(...[...new Set([low, high])].sort((a, b) => a - b));
  }
  return { x: kept.map((i) => x[i]), y: kept.map((i) => y[i]) };
}

/** Exponential mean; early values average the points so far. */
function smoothed({ x, y }, strength) {
  let mean = 0;
  let weight = 0;
  return { x, y: y.map((value) => {
    mean = strength * mean + (1 - strength) * value;
    weight = strength * weight + 1 - strength;
    return mean / weight;
  }) };
}

/** Escape markup, which Plotly would interpret in names. */
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

/** Error bars, and what they say at a point; of points without an interval nothing. */
function intervalsOf(points, ends, colour) {
  if (!ends?.some(Boolean)) return {};
  const reach = (end, sign) => ends.map((one, i) => (one ? sign * (one[end] - points.y[i]) : 0));
  return {
    error_y: { type: "data", symmetric: false, array: reach(1, 1), arrayminus: reach(0, -1), color: colour, thickness: 1.25, width: 4 },
    text: ends.map((one) => (one ? ` (95 %: ${figure(one[0])} to ${figure(one[1])})` : "")),
  };
}

function tracesOf(chart, runs, { by, smoothing }) {
  const traces = [];
  for (const run of runs) {
    for (const line of chart.lines) {
      const kind = KINDS[line.kind];
      const { points, ends } = measured.get(run.id).points(line, by, measured.get(run.trained));
      if (!points.x.length) continue;
      const name = plain(kind.label ? `${run.label}, ${kind.label}` : run.label);
      const colour = colourOf(run.id);
      const common = { type: "scatter", name, meta: run.id, hovertemplate: `%{y:.4~g}<extra>${name}</extra>` };
      if (line.kind !== "train" || points.x.length === 1) {
        const marker = { symbol: kind.symbol, size: 7, color: colour, line: { color: colour, width: 1.5 } };
        const intervals = intervalsOf(points, ends, colour);
        const hovertemplate = `%{y:.4~g}${intervals.text ? "%{text}" : ""}<extra>${name}</extra>`;
        traces.push({ ...common, ...points, ...intervals, hovertemplate, mode: "lines+markers", marker,
          line: { color: colour, width: 1, dash: "dot" } });
        continue;
      }
      if (smoothing > 0) {
        traces.push({ ...common, ...thinned(points), mode: "lines", opacity: 0.25, hoverinfo: "skip",
          hovertemplate: undefined, line: { color: colour, width: 1 } });
      }
      const shown = thinned(smoothing > 0 ? smoothed(points, smoothing) : points);
      traces.push({ ...common, ...shown, mode: "lines", line: { color: colour, width: 1.75, dash: dashOf(run) } });
    }
  }
  return traces;
}

/** A step's seconds by activity, as areas; for many steps, means. */
function timeTraces(run, by) {
  const metrics = measured.get(run);
  const { at, y } = metrics.series.get("seconds/step");
  const values = new Map(TIME_PARTS.map(([name]) => [name, metrics.byLine(name)]).concat([["seconds/step", metrics.byLine("seconds/step")]]));
  const steps = at.filter((_, i) => y[i] > 0);
  const stretch = Math.ceil(steps.length / 300);
  const buckets = [];
  for (let start = 0; start < steps.length; start += stretch) buckets.push(steps.slice(start, start + stretch));
  const mean = (bucket, name) => bucket.reduce((sum, line) => sum + (values.get(name)[line] ?? 0), 0) / bucket.length;
  const x = buckets.map((bucket) => metrics.places[by][bucket[0]]);
  const rest = buckets.map((bucket) => mean(bucket, "seconds/step"));
  const traces = [];
  const add = (label, colour, y) => traces.push({ type: "scatter", mode: "lines", stackgroup: "time", name: label,
    x, y, fillcolor: colour, line: { color: colour, width: 0.5 }, hovertemplate: `%{y:.3~g} s<extra>${label}</extra>` });
  for (const [name, label, colour] of TIME_PARTS) {
    if (!steps.some((line) => values.get(name)[line] > 0)) continue;
    const y = buckets.map((bucket) => mean(bucket, name));
    y.forEach((value, i) => (rest[i] -= value));
    add(label, colour, y);
  }
  add("rest", "#8a94a3", rest.map((value) => Math.max(0, value)));
  return traces;
}

function layoutOf(by, legend) {
  const axis = { gridcolor: styled("--grid"), linecolor: styled("--grid"), zerolinecolor: styled("--line"),
    tickfont: { size: 11 }, automargin: true };
  const spike = { spikethickness: 1, spikedash: "solid", spikecolor: styled("--muted") };
  return {
    height: legend ? 215 : 180,
    margin: { l: 8, r: 10, t: 8, b: 8 },
    paper_bgcolor: styled("--raised"),
    plot_bgcolor: styled("--raised"),
    font: { family: "system-ui, sans-serif", color: styled("--muted") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: styled("--muted"), activecolor: styled("--text") },
    hovermode: "x unified",
    dragmode: PHONE.matches ? false : "zoom",
    hoverlabel: { bgcolor: styled("--raised"), bordercolor: styled("--line"), font: { size: 12, color: styled("--text") } },
    showlegend: legend,
    legend: { orientation: "h", y: -0.25, font: { size: 11 } },
    xaxis: { ...axis, ...spike, nticks: 7, title: by === "step" ? undefined : { text: by, font: { size: 11 }, standoff: 4 } },
    yaxis: { ...axis, nticks: 5, rangemode: legend ? "tozero" : "normal" },
    uirevision: "kept", // keep the zoom when new data arrives
  };
}

const PLOT = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
const PHONE = matchMedia("(max-width: 640px)"); // there, a drag scrolls the page

class CurvesPage {
  constructor() {
    this.by = "step";
    this.smoothing = 0;
    this.chosen = [];
    this.opened = new Set(); // sections whose empty charts are shown
    this.cards = new Map();
    this.undrawn = new Set();
    this.names = 0;
    this.charts = { sections: [], others: [] };
  }

  show(page) {
    this.page = page;
    this.cards.clear();
    this.built = "";
    this.observer?.disconnect();
    this.observer = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "300px" });
    this.body = make("div", {}, loadingCards());
    const by = make("select", { "aria-label": "horizontal axis", on: { change: () => this.redraw({ by: by.value }) } },
      ...["step", "tokens", "hours"].map((name) => make("option", { value: name, selected: name === this.by }, `by ${name}`)));
    const smoothing = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.smoothing,
      "aria-label": "smoothing", on: { input: () => this.redraw({ smoothing: Number(smoothing.value) }) } });
    this.finder = make("input", { type: "search", list: "metric-names", placeholder: "find or add a metric",
      "aria-label": "find or add a metric", on: { input: () => this.build(), change: () => this.choose() } });
    this.nameList = make("datalist", { id: "metric-names" });
    page.replaceChildren(
      make("div", { class: "bar" }, this.finder, this.nameList, make("label", {}, by),
        make("label", {}, "smoothing ", smoothing),
        ...["— training", "● held-out, sampled", "◇ held-out, greedy", "■ rollout"].map((text) => make("span", { class: "note" }, text)),
        make("span", { class: "note no-phone" }, "drag: zoom, double click: reset, click: the step's trajectories")),
      this.body,
    );
    return this.update(lastState);
  }

  async update(state) {
    if (!state) return;
    const [changed] = await Promise.all([takeMetrics(state), loadPlots()]);
    const names = new Set([...measured.values()].flatMap(({ series }) => [...series.keys()])).size;
    if (names !== this.names) {
      this.charts = await source.charts();
      this.names = names;
    }
    if (current !== this) return;
    if (changed || !this.built) this.build();
  }

  redraw(change = {}) {
    Object.assign(this, change);
    this.build();
  }

  /** The charts of the server's sections and others, as far as these runs have measured something for them. */
  measuredBy(runs, charts) {
    const named = new Set(runs.flatMap((run) => [...(measured.get(run.id)?.series.keys() ?? [])]));
    return charts.filter((chart) => chart.lines.some((line) => named.has(line.name)));
  }

  /** Supervised stages have steps, losses and speeds of another size than RL: their charts are separate ones. */
  supervised() {
    const runs = lastState.runs.filter((run) => run.supervised);
    const charts = this.measuredBy(runs, [...this.charts.sections.flatMap((section) => section.charts), ...this.charts.others]);
    return charts.sort((a, b) => (b.key === "loss") - (a.key === "loss"))
      .map((chart) => ({ ...chart, key: `${chart.key} (SFT)`, supervised: true }));
  }

  reinforced(charts) {
    return this.measuredBy(lastState.runs.filter((run) => !run.supervised), charts);
  }

  /** All charts, by key. */
  all() {
    const charts = this.reinforced([...this.charts.sections.flatMap((section) => section.charts), ...this.charts.others]);
    return new Map([...charts, ...this.supervised()].map((chart) => [chart.key, chart]));
  }

  choose() {
    const wanted = this.finder.value.trim();
    if (!this.all().has(wanted)) return;
    if (!this.chosen.includes(wanted)) this.chosen.unshift(wanted);
    this.finder.value = "";
    this.build();
  }

  sections() {
    const all = this.all();
    const wanted = this.finder.value.trim().toLowerCase();
    if (wanted) {
      const found = [...all.values()].filter((chart) => chart.key.toLowerCase().includes(wanted)).slice(0, 30);
      return [{ title: `Found: ${found.length}`, charts: found, whole: true }];
    }
    const chosen = this.chosen.filter((key) => all.has(key)).map((key) => ({ ...all.get(key), chosen: true }));
    const sections = this.charts.sections.map(({ title, charts }) => ({ title, charts: this.reinforced(charts) }));
    sections.push({ title: SUPERVISED, charts: this.supervised() });
    const timed = (id, name) => measured.get(id)?.series.get(name)?.lively;
    // of a run that measures no parts, everything would be rest
    for (const run of shownRuns().filter(({ id }) => timed(id, "seconds/step") && TIME_PARTS.some(([name]) => timed(id, name)))) {
      sections.find(({ title }) => title === (run.supervised ? SUPERVISED : "Speed")).charts.push({
        key: `time of ${run.id}`, run: run.id, title: `where a step's time goes: ${run.label}`, unit: "s", lines: [],
        meaning: "seconds of a step by what they went into; rest is what no other figure measures, such as scoring",
      });
    }
    return [...(chosen.length ? [{ title: "Chosen", charts: chosen, whole: true }] : []), ...sections.filter(({ charts }) => charts.length)];
  }

  /** Lay out the current charts, and draw those that are visible. */
  build() {
    const sections = this.sections().map((section) => ({ ...section, charts: section.charts.map((chart) => ({
      ...chart, dull: !section.whole && !chart.run && this.isDull(chart) })) }));
    const layout = JSON.stringify([sections.map(({ title, charts }) => [title, charts.map((c) => [c.key, c.dull])]),
      [...this.opened]]);
    if (layout !== this.built) {
      this.built = layout;
      this.observer.disconnect();
      for (const card of this.cards.values()) Plotly.purge(card.plot);
      this.cards.clear();
      this.body.replaceChildren(...sections.map((section) => this.section(section)));
      if (!sections.length) this.body.append(make("p", { class: "empty" }, "Nothing is measured yet."));
      this.nameList.replaceChildren(...[...this.all().keys()].sort().map((key) => make("option", { value: key })));
    }
    for (const card of this.cards.values()) if (card.seen) this.draw(card);
  }

  isDull(chart) {
    return !this.runsOf(chart).some((run) => chart.lines.some((line) => measured.get(run.id).series.get(line.name)?.lively));
  }

  /** The shown runs whose values a chart draws. */
  runsOf(chart) {
    return shownRuns().filter((run) => measured.has(run.id) && run.supervised === Boolean(chart.supervised));
  }

  section({ title, charts }) {
    const lively = charts.filter((chart) => !chart.dull);
    const dull = charts.filter((chart) => chart.dull);
    const folded = title === SUPERVISED && isComparing();
    const open = this.opened.has(title);
    const toggle = () => {
      if (!this.opened.delete(title)) this.opened.add(title);
      this.build();
    };
    if (folded) {
      const shown = open ? charts : [];
      const button = make("button", { class: "quiet", "aria-expanded": String(open), on: { click: toggle } }, open ? "hide" : "show");
      return make("section", { class: "curves" }, make("h2", {}, title, button),
        make("div", { class: "charts" }, ...shown.map((chart) => this.card(chart))));
    }
    const more = dull.length
      ? make("button", { class: "quiet", on: { click: toggle } }, open ? "hide what is 0 throughout" : `${dull.length} more are 0 throughout`)
      : null;
    return make("section", { class: "curves" }, make("h2", {}, title, more),
      make("div", { class: "charts" }, ...[...lively, ...(open ? dull : [])].map((chart) => this.card(chart))));
  }

  card(chart) {
    const plot = make("div", { class: "plot" });
    const about = make("span", {}, chart.meaning || "no table of ours knows this figure");
    const drop = chart.chosen
      ? make("button", { class: "quiet", "aria-label": `remove ${chart.title}`, on: { click: () => {
        this.chosen = this.chosen.filter((key) => key !== chart.key);
        this.build();
      } } }, "×")
      : null;
    const title = make("h3", { tabindex: 0, on: {
      mousemove: (event) => showTip(about, event),
      mouseleave: () => showTip(null),
      focus: (event) => showTip(about, event),
      blur: () => showTip(null),
    } }, chart.title, chart.unit ? make("span", { class: "unit" }, chart.unit) : null,
      chart.supervised ? [" ", make("span", { class: "unit" }, "SFT")] : null);
    const element = make("article", { class: "card", data: { chart: chart.key } },
      make("div", { class: "card-head" }, title, drop), plot);
    const card = { chart, plot, element, seen: false };
    this.cards.set(element, card);
    this.observer.observe(element);
    return element;
  }

  onSeen(entries) {
    for (const entry of entries) {
      const card = this.cards.get(entry.target);
      if (!card) continue;
      card.seen = entry.isIntersecting;
      if (card.seen) this.undrawn.add(card);
    }
    this.drawNext();
  }

  /** Draw one plot per frame, so that the first one does not wait for the others, and the page stays responsive. */
  drawNext() {
    const [card] = this.undrawn;
    if (!card) return;
    this.undrawn.delete(card);
    if (card.seen && this.cards.has(card.element)) this.draw(card);
    requestAnimationFrame(() => this.drawNext());
  }

  draw({ chart, plot }) {
    const traces = chart.run ? timeTraces(chart.run, this.by) : tracesOf(chart, this.runsOf(chart), this);
    Plotly.react(plot, traces, layoutOf(this.by, Boolean(chart.run)), { ...PLOT, displayModeBar: PHONE.matches ? false : "hover" });
    // Plotly gives the element its `on` with the first drawing
    if (!plot.clickable) plot.on("plotly_click", ({ points }) => this.openStep(points[0]));
    plot.clickable = true;
  }

  /** Show the trajectories of a step of training. */
  openStep({ x, data }) {
    const run = lastState.runs.find(({ id }) => id === data.meta);
    if (this.by === "step" && run && !run.supervised && data.line.dash !== "dot") {
      location.hash = `#/trajectories?${new URLSearchParams({ run: run.id, source: "train", step_min: x, step_max: x })}`;
    }
  }

  leave() {
    this.observer.disconnect();
    for (const card of this.cards.values()) Plotly.purge(card.plot);
    this.cards.clear();
  }
}
