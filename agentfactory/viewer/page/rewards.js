"use strict";

// The distribution of the rewards of the chains that a list shows, step by step if one likes.

/** The bins of a histogram of these (run, reward) rows, as the server makes them for any number of chains. */
function rewardBins(rows) {
  const scored = rows.filter(({ reward }) => reward !== null && Math.abs(reward) < 1e300);
  const values = scored.map(({ reward }) => reward);
  if (!values.length) return { chains: rows.length, scored: 0, mean: null, width: 0, bins: [] };
  const lowest = values.reduce((a, b) => Math.min(a, b));
  const highest = values.reduce((a, b) => Math.max(a, b));
  const width = binWidth(lowest, highest);
  const first = width ? Math.floor(lowest / width + 1e-9) : 0;
  const last = width ? Math.ceil(highest / width - first - 1e-9) - 1 : 0; // the highest reward closes the last bin
  const bins = new Map();
  for (const { run, reward } of scored) {
    const bin = width ? Math.min(Math.trunc(reward / width - first + 1e-9), last) : 0;
    const key = `${bin} ${run}`;
    const known = bins.get(key) ?? { run, from: width ? (first + bin) * width : reward, lowest: reward, highest: reward, chains: 0 };
    bins.set(key, { ...known, lowest: Math.min(known.lowest, reward), highest: Math.max(known.highest, reward), chains: known.chains + 1 });
  }
  const sorted = [...bins.values()].sort((a, b) => a.from - b.from || (a.run < b.run ? -1 : 1));
  return { chains: rows.length, scored: scored.length, mean: values.reduce((a, b) => a + b) / values.length, width, bins: sorted };
}

/** A round width, of which about 20 cover the range; 0 if all values are equal. */
function binWidth(lowest, highest) {
  if (lowest === highest) return 0;
  return roundAbove(Math.max((highest - lowest) / 20, Math.max(Math.abs(lowest), Math.abs(highest)) * 1e-12));
}

/** The bins whose edges are labelled: at most about seven, at round numbers that are edges. */
function labelledBins(first, width, count) {
  let bins = Math.ceil(count / 7);
  while (Math.abs(roundAbove(bins * width) / width - bins) > 1e-6) bins++;
  // the edges are `first / width + place` widths from 0
  const offset = ((Math.round(first / width) % bins) + bins) % bins;
  return Array.from({ length: count + 1 }, (_, place) => place).filter((place) => (place + offset) % bins === 0);
}

class RewardsPanel {
  /** `go` is called with a change of the list's query. */
  constructor(go) {
    this.go = go;
    this.element = make("section", { class: "panel", id: "rewards", "aria-label": "rewards", hidden: true });
  }

  async load(query) {
    this.query = query;
    let answer;
    try {
      answer = await source.rewards(Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "")));
    } catch {
      this.element.hidden = true; // the list says what is wrong
      return;
    }
    const shown = JSON.stringify([query, answer]);
    if (query !== this.query || shown === this.shown) return;
    this.shown = shown;
    this.draw(answer);
  }

  draw({ by, steps, chains, scored, mean, width, bins }) {
    this.element.hidden = !chains && steps.first === null;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const one = this.query[`${by}_min`] !== "" && this.query[`${by}_min`] === this.query[`${by}_max`];
    const which = one ? `${by} ${this.query[`${by}_min`]}` : `all ${by}s`;
    const unscored = chains - scored ? `, ${figure(chains - scored)} without a reward` : "";
    const said = scored ? `${figure(scored)} chains, mean ${figure(mean)}${unscored}` : `no chain has a reward${unscored && `; ${figure(chains)} have none`}`;
    const jump = (label, text, to) => make("button", { "aria-label": label, title: label, disabled: to === null,
      on: { click: () => this.go({ [`${by}_min`]: String(to), [`${by}_max`]: String(to), page: "" }) } }, text);
    const clear = (label, names) => (names.some((name) => this.query[name] !== "")
      ? make("button", { class: "chip", on: { click: () => this.go({ ...Object.fromEntries(names.map((name) => [name, ""])), page: "" }) } }, label) : null);
    this.element.replaceChildren(
      make("div", { class: "rewards-head" },
        make("h3", {}, "Rewards", make("span", { class: "unit" }, which)),
        make("span", { class: "note", role: "status" }, said),
        clear("all rewards ×", ["reward_min", "reward_max"]), clear(`all ${by}s ×`, [`${by}_min`, `${by}_max`]),
        steps.first === null ? null : make("span", { class: "stepper" },
          jump(`first ${by}`, "⇤", one && steps.before === null ? null : steps.first),
          jump(`${by} before`, "←", one ? steps.before : steps.last),
          jump(`${by} after`, "→", one ? steps.after : steps.first),
          jump(`last ${by}`, "⇥", one && steps.after === null ? null : steps.last))),
      scored ? this.histogram(width, bins) : "");
    if (focused) this.element.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  histogram(width, bins) {
    const columns = new Map();
    const first = bins[0].from;
    const count = width ? Math.round((bins.at(-1).from - first) / width) + 1 : 1;
    for (const bin of bins) {
      const place = width ? Math.round((bin.from - first) / width) : 0;
      columns.set(place, [...(columns.get(place) ?? []), bin]);
    }
    const total = (parts) => parts.reduce((sum, { chains }) => sum + chains, 0);
    const most = Math.max(...[...columns.values()].map(total));
    // as many digits as tell two edges apart
    const digits = width ? Math.min(20, Math.max(0, 1 - Math.floor(Math.log10(width)))) : 6;
    const edge = (place) => Number((first + place * width).toFixed(digits)).toLocaleString("en", { maximumFractionDigits: 20 });
    const bars = Array.from({ length: count }, (_, place) => {
      const parts = columns.get(place);
      if (!parts) return make("span", { class: "bin" });
      const range = width ? `reward ${edge(place)} to ${place + 1 < count ? "below " : ""}${edge(place + 1)}` : `reward ${edge(0)}`;
      const low = Math.min(...parts.map(({ lowest }) => lowest));
      const high = Math.max(...parts.map(({ highest }) => highest));
      const about = `${range}: ${figure(total(parts))} chain${total(parts) === 1 ? "" : "s"}`;
      return make("button", { class: "bin", "aria-label": `${about}; show them`, on: {
        click: () => this.go({ reward_min: String(low), reward_max: String(high), page: "" }),
        mousemove: (event) => showTip(this.tip(about, parts), event),
        mouseleave: () => showTip(null),
      } }, ...parts.map(({ run, chains }) => {
        const bar = make("span", { class: "bin-part" });
        bar.style.height = `${(100 * chains) / most}%`;
        bar.style.background = colourOf(run);
        return bar;
      }));
    });
    const axis = width
      ? labelledBins(first, width, count).map((place) => {
        const label = make("span", { class: place === 0 ? "first" : place === count ? "last" : null }, edge(place));
        label.style.left = `${(100 * place) / count}%`;
        return label;
      })
      : [make("span", { class: "only" }, edge(0))];
    return make("div", { class: "histogram" },
      make("span", { class: "most", "aria-hidden": "true" }, figure(most)),
      make("div", { class: "bins", role: "group", "aria-label": "histogram of rewards" }, ...bars),
      make("div", { class: "axis", "aria-hidden": "true" }, ...axis));
  }

  tip(about, parts) {
    const label = (id) => lastState?.runs.find((run) => run.id === id)?.label ?? id;
    return make("div", {}, about, parts.length > 1
      ? make("dl", { class: "facts" }, ...parts.flatMap(({ run, chains }) => [make("dt", {}, swatch(run), " ", label(run)), make("dd", {}, figure(chains))]))
      : null);
  }
}
