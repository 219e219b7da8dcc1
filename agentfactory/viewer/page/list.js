"use strict";

// The list of trajectories and groups, with its filters. The URL contains the query.

const FILTERS = ["view", "run", "source", "tasks", "outcome", "success", "tool", "version_min", "version_max", "step_min", "step_max",
  "reward_min", "reward_max", "text", "group", "sort", "ascending", "page"];

function addressOf(row) {
  return `#/trajectory/${row.run}/${encodeURIComponent(row.file)}/${row.byte}/${row.place ?? 0}`;
}

function outcomeChip(outcome) {
  const good = outcome === "completed";
  const broken = ["tool_infrastructure", "inference_error", "reward_error", "timeout", "cancelled"].includes(outcome);
  return make("span", { class: `chip ${good ? "good" : broken ? "broken" : "limit"}` }, outcome.replaceAll("_", " "));
}

const VERSION = { title: "version", sort: "newest", figure: "version", about: "of the weights when the group began" };
const STEP = { title: "step", sort: "step", figure: "step", about: "that trained the group" };

const CHAIN_COLUMNS = [
  { title: "chain", cell: (row) => make("td", { class: "name" }, swatch(row.run), make("a", { href: addressOf(row) }, row.chain)) },
  { title: "task", cell: (row) => make("td", { class: "preview" }, row.preview) },
  { title: "from", cell: (row) => make("td", {}, row.source) },
  VERSION,
  STEP,
  { title: "outcome", cell: (row) => make("td", { title: row.error ?? row.stop }, outcomeChip(row.outcome)) },
  { title: "reward", sort: "reward", figure: "reward" },
  { title: "success", sort: "success", figure: "success" },
  { title: "turns", sort: "turns", figure: "turns" },
  { title: "calls", sort: "calls", figure: "calls" },
  { title: "errors", sort: "errors", figure: "errors", about: "calls without a result: malformed, refused, failed or too slow" },
  { title: "tokens", sort: "tokens", figure: "tokens", about: "of all rows, prompt included" },
  { title: "seconds", sort: "seconds", figure: "seconds", digits: 1 },
];

const NO_GRADIENT = "For algorithms with advantages relative to the group, such as GRPO, these chains have no gradient.";

function haveEqualRewards(group) {
  return group.chains > 1 && !group.unscored && group.lowest === group.highest;
}

const GROUP_COLUMNS = [
  { title: "group", cell: (row, page) => make("td", { class: "name" }, swatch(row.run),
    make("a", { href: page.addressWith({ view: "", group: row.group_id, run: row.run, source: row.source, page: "", sort: "" }) }, row.group_id),
    row.source === "train" && haveEqualRewards(row) ? make("span", { class: "chip limit", title: NO_GRADIENT }, "equal rewards") : null) },
  { title: "task", cell: (row) => make("td", { class: "preview" }, row.preview) },
  { title: "from", cell: (row) => make("td", {}, row.source) },
  VERSION,
  STEP,
  { title: "chains", figure: "chains" },
  { title: "mean reward", sort: "reward", figure: "reward" },
  { title: "lowest", figure: "lowest" },
  { title: "highest", figure: "highest" },
  { title: "success", sort: "success", figure: "success" },
  { title: "turns", sort: "turns", figure: "turns" },
  { title: "calls", sort: "calls", figure: "calls" },
  { title: "no reward", figure: "unscored", about: "chains without a reward" },
];

class ListPage {
  show(page, _, parameters) {
    this.page = page;
    this.query = Object.fromEntries(FILTERS.map((name) => [name, parameters.get(name) ?? ""]));
    this.shown = "";
    this.choices = {};
    this.form = make("form", { class: "bar filters", on: { submit: (event) => event.preventDefault() } }, ...this.fields());
    this.count = make("span", { class: "count", "aria-live": "polite" });
    this.table = make("table", { class: "list" }, make("caption", {}, loadingSign("trajectories")));
    this.pager = make("div", { class: "pager" });
    this.rewards = new RewardsPanel((change) => this.goTo(change));
    page.replaceChildren(this.form, this.rewards.element, make("div", { class: "scroll" }, this.table), this.pager);
    return this.load();
  }

  fields() {
    const change = later(200, () => this.change());
    const select = (name, label, options) => {
      this.choices[name] = make("select", { name, "aria-label": label, on: { change: () => this.change() } });
      this.fill(name, label, options);
      return this.choices[name];
    };
    const range = (name, label) => make("span", { class: "range" }, label, ...["min", "max"].flatMap((end, number) => [
      number ? "–" : "",
      make("input", { name: `${name}_${end}`, type: "text", inputmode: "decimal", size: 4, value: this.query[`${name}_${end}`],
        "aria-label": `${label}, ${end === "min" ? "lowest" : "highest"}`, on: { input: change } }),
    ]));
    const group = this.query.group
      ? make("button", { class: "chip", type: "button", on: { click: () => this.change({ group: "" }) } }, `group ${this.query.group} ×`)
      : null;
    // on a phone the other filters wait behind a button
    const more = make("button", { class: "more", type: "button", "aria-expanded": "false", on: { click: () => {
      const open = this.form.classList.toggle("open");
      more.setAttribute("aria-expanded", String(open));
    } } }, "filters");
    return [
      select("view", "trajectories", [["groups", "groups"]]),
      more,
      select("run", "all runs", []),
      select("source", "from anywhere", []),
      select("tasks", "tasks of any source", []),
      select("outcome", "any outcome", []),
      select("success", "any success", []),
      select("tool", "any tool", []),
      range("version", "version"),
      range("step", "step"),
      range("reward", "reward"),
      make("input", { name: "text", type: "search", placeholder: "search in all messages", "aria-label": "text",
        value: this.query.text, on: { input: change } }),
      group,
    ];
  }

  /** The choices of a filter; the chosen one stays, even if no chain has it any more. */
  fill(name, none, options) {
    const wanted = this.query[name];
    const all = [["", none], ...options];
    if (wanted && !all.some(([value]) => value === wanted)) all.push([wanted, wanted]);
    const made = JSON.stringify(all);
    const select = this.choices[name];
    if (select.dataset.made === made) return;
    select.dataset.made = made;
    select.replaceChildren(...all.map(([value, label]) => make("option", { value, selected: value === wanted }, label)));
  }

  change(also = {}) {
    if (current !== this) return; // the debounced call for the last input may run after the page has changed
    const fields = Object.fromEntries(new FormData(this.form));
    const resort = fields.view !== this.query.view ? { sort: "", ascending: "" } : {};
    this.go({ ...fields, page: "", ...resort, ...also });
  }

  addressWith(change) {
    const query = { ...this.query, ...change };
    const given = Object.entries(query).filter(([, value]) => value !== "");
    return `#/trajectories${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  }

  go(change) {
    const before = this.query;
    history.replaceState(null, "", this.addressWith(change));
    this.query = { ...this.query, ...change };
    if (before.group !== this.query.group) {
      // the form has a button for the group that is shown
      return this.show(this.page, [], new URLSearchParams(location.hash.split("?")[1] ?? ""));
    }
    return this.load();
  }

  /** The same for a change that the form has fields for. */
  goTo(change) {
    for (const [name, value] of Object.entries(change)) if (this.form.elements[name]) this.form.elements[name].value = value;
    return this.go(change);
  }

  update() {
    return this.load();
  }

  /** Request the current page, and repeat until all chains are searched. */
  async load() {
    const query = this.query;
    let answer;
    try {
      answer = await source.list(Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "")));
    } catch (error) {
      if (query === this.query) this.table.replaceChildren(make("caption", { class: "empty" }, error.message));
      this.shown = "";
      return;
    }
    if (query !== this.query || current !== this) return;
    this.fillChoices(answer.facets);
    const shown = JSON.stringify([query, answer.rows, answer.total, answer.unsearched]);
    if (shown !== this.shown) this.draw(answer);
    this.shown = shown;
    if (!answer.unsearched) this.rewards.load(query);
    if (answer.unsearched) setTimeout(() => query === this.query && current === this && this.load(), 20);
  }

  fillChoices(facets) {
    const counted = (found) => Object.entries(found).map(([name, count]) => [name, `${name.replaceAll("_", " ")} (${figure(count)})`]);
    this.fill("run", "all runs", (lastState?.runs ?? []).map((run) => [run.id, run.label]));
    this.fill("source", "from anywhere", counted(facets.source));
    this.fill("tasks", "tasks of any source", counted(facets.tasks));
    // a run without sources has nothing to choose
    this.choices.tasks.hidden = this.choices.tasks.options.length === 1;
    this.fill("outcome", "any outcome", counted(facets.outcome));
    const successes = { yes: "successful", no: "not successful" };
    this.fill("success", "any success", Object.entries(facets.success).map(([name, count]) => [name, `${successes[name]} (${figure(count)})`]));
    this.fill("tool", "any tool", Object.entries(facets.tool).map(([name, count]) => [name, `${name} (${figure(count)})`]));
  }

  draw({ rows, total, unsearched }) {
    const columns = this.query.view === "groups" ? GROUP_COLUMNS : CHAIN_COLUMNS;
    const size = 50;
    const page = Number(this.query.page || 0);
    const head = columns.map((column) => {
      const title = column.about ?? null;
      if (!column.sort) return make("th", { class: column.figure ? "figure" : null, title }, column.title);
      const sorted = (this.query.sort || "newest") === column.sort;
      const up = this.query.ascending === "1";
      const next = { sort: column.sort, ascending: sorted && !up ? "1" : "", page: "" };
      return make("th", { class: "figure", title, "aria-sort": sorted ? (up ? "ascending" : "descending") : null },
        make("button", { class: "quiet", on: { click: () => this.go(next) } }, column.title, sorted ? (up ? " ↑" : " ↓") : ""));
    });
    const cell = (column, row) => {
      if (column.cell) return column.cell(row, this);
      const value = row[column.figure];
      const text = column.digits !== undefined && value !== null ? value.toFixed(column.digits) : figure(value);
      return make("td", { class: "figure", data: { title: column.title } }, text);
    };
    const body = rows.map((row) => make("tr", { on: { click: (event) => {
      // a click on the row opens its link
      if (!event.target.closest("a") && !String(getSelection())) event.currentTarget.querySelector("a").click();
    } } }, ...columns.map((column) => cell(column, row))));
    const filtered = FILTERS.some((name) => !["view", "sort", "ascending"].includes(name) && this.query[name]);
    this.table.replaceChildren(...(total || unsearched
      ? [make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)]
      : [make("caption", { class: "empty" }, ...(filtered
        ? ["Nothing matches these filters. ", make("a", { href: "#/trajectories" }, "Show all")]
        : ["No trajectory is saved yet."]))]));
    const from = Math.min(total, page * size + 1);
    const kind = this.query.view === "groups" ? "groups" : "trajectories";
    const searching = unsearched ? `; searching, ${figure(unsearched)} trajectories to go` : "";
    const bounded = source.held === undefined ? "" : `; this file holds ${figure(source.held)} of ${figure(allChains())} trajectories`;
    this.count.textContent = total
      ? `${figure(from)}–${figure(Math.min(total, (page + 1) * size))} of ${figure(total)} ${kind}${searching}${bounded}`
      : `no ${kind}${searching}${bounded}`;
    const turn = (label, to, possible) => make("button", { disabled: !possible, on: { click: () => {
      this.go({ page: to ? String(to) : "" });
      scrollTo(0, 0);
    } } }, label);
    this.pager.replaceChildren(turn("← previous", page - 1, page > 0), this.count,
      turn("next →", page + 1, (page + 1) * size < total));
  }

  leave() {}
}

function allChains() {
  return (lastState?.runs ?? []).reduce((sum, run) => sum + run.chains, 0);
}
