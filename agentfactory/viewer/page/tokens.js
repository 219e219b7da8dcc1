"use strict";

// The tokens of a chain, coloured by their properties.

const MASK = [63, 116, 209];
const ABOVE = [46, 125, 216];
const BELOW = [219, 98, 35];
const UNLIKELY = [198, 72, 120];
const DARKEST = 0.6; // maximum opacity of a background, so that its text stays readable

function paint([red, green, blue], share) {
  return share > 0 ? `rgba(${red}, ${green}, ${blue}, ${(DARKEST * Math.min(1, share)).toFixed(3)})` : "";
}

function hexColour(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** The trainer's log-probability minus the server's, for each token that has both. */
function differences(row) {
  return row.proximal?.map((value, i) => (value === null || row.logprobs[i] === null ? null : value - row.logprobs[i]));
}

function largest(rows, valuesOf) {
  let most = 0;
  for (const row of rows) for (const value of valuesOf(row) ?? []) if (value !== null) most = Math.max(most, Math.abs(value));
  return most;
}

/** Minus the divergence from the teacher, for each graded token. */
function agreement(row) {
  return row.divergence?.map((value) => (value === null ? null : -value));
}

const NOT_SAVED = "This run saved none for this trajectory: trajectories/credit.jsonl has no line of it, because its group "
  + "was not trained (yet), the chain took no part, or the run does not write that file.";

/** Signed values, coloured relative to the largest absolute value of the trajectory. */
function signed(rows, valuesOf, meaning) {
  const most = largest(rows, valuesOf);
  if (!rows.some((row) => valuesOf(row))) return { missing: NOT_SAVED };
  return {
    legend: [[paint(BELOW, 1), `−${figure(most)}`], ["", "0"], [paint(ABOVE, 1), `+${figure(most)}`]],
    about: `${meaning}; the strongest colour is the largest of this trajectory.`,
    colour: (row, i) => {
      const value = valuesOf(row)?.[i] ?? null;
      return value === null || most === 0 ? "" : paint(value > 0 ? ABOVE : BELOW, Math.abs(value) / most);
    },
  };
}

/** Colourings: each returns `legend`, `about` and `colour(row, position)`, or the reason in `missing` if it cannot. */
const COLOURINGS = {
  mask: {
    label: "mask",
    make: () => ({
      legend: [[paint(MASK, 0.5), "sampled by the model, so it may be trained"], ["", "context: prompts, results, closings"]],
      about: "",
      colour: (row, i) => (row.mask[i] ? paint(MASK, 0.5) : ""),
    }),
  },
  advantage: {
    label: "advantage",
    make: (rows) => signed(rows, (row) => row.advantage, "The advantage that the trainer gave the token: training makes blue tokens more likely, orange ones less likely"),
  },
  difference: {
    label: "log-probability difference",
    make: (rows) => {
      const values = new Map(rows.map((row) => [row, differences(row)]));
      return signed(rows, (row) => values.get(row),
        "The trainer's log-probability before the update minus the server's, in nats");
    },
  },
  divergence: {
    label: "divergence from the teacher",
    make: (rows) => {
      const values = new Map(rows.map((row) => [row, agreement(row)]));
      const made = signed(rows, (row) => values.get(row),
        "Minus the divergence before the update, in nats: the teacher finds orange tokens wrong");
      return made.missing ? { missing: "No token of this trajectory has been graded by a teacher." } : made;
    },
  },
  logprob: {
    label: "server's log-probability",
    make: () => ({
      legend: [["", "certain"], [paint(UNLIKELY, 0.5), "probability 0.5"], [paint(UNLIKELY, 1), "near 0"]],
      about: "After temperature, as the server sampled it.",
      colour: (row, i) => (row.mask[i] && row.logprobs[i] !== null ? paint(UNLIKELY, 1 - Math.exp(row.logprobs[i])) : ""),
    }),
  },
  version: {
    label: "weight version",
    make: (rows) => {
      const names = [...new Set(rows.flatMap((row) => row.versions.map(({ version }) => version)))]
        .sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const colour = (name) => paint(hexColour(COLOURS[names.indexOf(name) % COLOURS.length]), 0.55);
      if (!names.length) return { missing: "The rows have no versions, because no token in them was sampled." };
      return {
        legend: names.map((name) => [colour(name), name]),
        about: "Underlined: the cached context may be of older weights.",
        colour: (row, i) => (row.version[i] < 0 ? "" : colour(row.versions[row.version[i]].version)),
      };
    },
  },
};

/** The rows of a chain, and their colouring. */
class TokenView {
  constructor(data, colouring, onChange) {
    this.data = data;
    this.spans = data.rows.map(() => []);
    this.colouring = COLOURINGS[colouring] ? colouring : "mask";
    this.legend = make("div", { class: "legend" });
    const choice = make("select", { "aria-label": "colour tokens by", on: { change: () => {
      this.colouring = choice.value;
      this.colour();
      onChange(choice.value);
    } } }, ...Object.entries(COLOURINGS).map(([name, { label }]) => make("option", { value: name, selected: name === this.colouring }, label)));
    const untold = data.tokenizer ? null : make("p", { class: "note" },
      "The run's tokenizer is not on this machine, so token ids are shown instead of text.");
    const lost = data.rows_problem ? make("p", { class: "note" }, `The tokens cannot be read: ${data.rows_problem}`) : null;
    this.element = make("div", { class: "token-view" },
      make("div", { class: "bar" }, make("label", {}, "colour by ", choice), this.legend), untold, lost,
      ...data.rows.map((row, number) => this.row(row, number)));
    this.element.addEventListener("mouseover", (event) => this.tell(event));
    this.element.addEventListener("mouseleave", () => showTip(null));
  }

  row(row, number) {
    const sampled = row.mask.reduce((sum, one) => sum + one, 0);
    const body = make("div", { class: "tokens", data: { row: number } });
    this.write(row, number, body, 0);
    return make("section", { class: "panel" },
      make("h3", {}, this.data.rows.length > 1 ? `Row ${number + 1} of ${this.data.rows.length}` : "Row",
        make("span", { class: "unit" }, `${figure(row.token_ids.length)} tokens, ${figure(sampled)} sampled`)),
      body);
  }

  /** Write the tokens a few thousand at a time, so that the page stays responsive. */
  write(row, number, body, from) {
    const end = Math.min(from + 3000, row.token_ids.length);
    const made = [];
    for (let i = from; i < end; i++) made.push(this.token(row, number, i));
    this.spans[number].push(...made);
    body.append(...made);
    if (this.painter) made.forEach((span, place) => this.paint(row, span, from + place));
    if (end < row.token_ids.length) requestAnimationFrame(() => this.write(row, number, body, end));
  }

  token(row, number, i) {
    const text = row.texts?.[i] ?? `${row.token_ids[i]} `;
    const shown = text === "" ? "·" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
    const mixed = row.version[i] >= 0 && row.versions[row.version[i]].mixed;
    const kinds = [row.mask[i] ? "sampled" : "context", mixed ? "mixed" : ""].filter(Boolean);
    return make("span", { class: kinds.join(" "), data: { i } }, shown);
  }

  /** Mark a token, and show it; tokens are written a few thousand at a time. */
  point(row, token) {
    const span = this.spans[row]?.[token];
    if (!span) {
      if (this.data.rows[row]?.token_ids.length > token) requestAnimationFrame(() => this.point(row, token));
      return;
    }
    span.classList.add("pointed");
    requestAnimationFrame(() => span.scrollIntoView({ block: "center" }));
  }

  colour() {
    this.painter = COLOURINGS[this.colouring].make(this.data.rows);
    if (this.painter.missing === NOT_SAVED) this.painter.missing = this.data.credit_problem ?? NOT_SAVED;
    const { missing, legend = [], about = "" } = this.painter;
    this.legend.replaceChildren(...(missing ? [make("span", { class: "missing" }, missing)] : [
      ...legend.map(([colour, label]) => {
        const square = make("span", { class: "swatch" });
        square.style.background = colour;
        return make("span", { class: "key" }, square, label);
      }),
      make("span", { class: "note" }, about),
    ]));
    this.data.rows.forEach((row, number) => this.spans[number].forEach((span, i) => this.paint(row, span, i)));
  }

  paint(row, span, i) {
    span.style.backgroundColor = this.painter.missing ? "" : this.painter.colour(row, i);
  }

  tell(event) {
    const span = event.target.closest("[data-i]");
    if (!span) return showTip(null);
    const row = this.data.rows[Number(span.parentElement.dataset.row)];
    const i = Number(span.dataset.i);
    const told = [["position", i], ["id", row.token_ids[i]]];
    if (row.texts) told.push(["text", JSON.stringify(row.texts[i])]);
    told.push(["mask", row.mask[i]]);
    if (row.mask[i]) {
      const logprob = row.logprobs[i];
      const probability = logprob === null ? "not finite" : `${figure(logprob)} (p ${figure(Math.exp(logprob))})`;
      told.push(["server's log-probability", probability]);
      const proximal = row.proximal?.[i] ?? null;
      if (proximal !== null) told.push(["trainer's", figure(proximal)]);
      if (proximal !== null && logprob !== null) told.push(["difference", figure(proximal - logprob)]);
      if ((row.divergence?.[i] ?? null) !== null) told.push(["divergence", figure(row.divergence[i])]);
      if ((row.advantage?.[i] ?? null) !== null) told.push(["advantage", figure(row.advantage[i])]);
    }
    const version = row.versions[row.version[i]];
    if (version) told.push(["weight version", version.version + (version.mixed ? ", mixed" : "")]);
    return showTip(make("dl", { class: "facts" }, ...told.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])), event);
  }
}
