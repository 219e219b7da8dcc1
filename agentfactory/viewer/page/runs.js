"use strict";

// All runs in a table: their figures, and the settings in which they differ.

const RUN_FIGURES = { success_before: "success before", success_after: "success after", greedy_after: "greedy after",
  reward_after: "held-out reward", reward: "last reward", loss: "last loss", train_wall_seconds: "seconds" };

class RunsPage {
  show(page) {
    this.page = page;
    this.shown = "";
    return this.load();
  }

  async load() {
    let told;
    try {
      if (!source.followed) throw new Error("An exported file has no table of runs.");
      told = await source.runs();
    } catch (error) {
      told = { error: error.message };
    }
    const shown = JSON.stringify(told);
    if (current !== this || shown === this.shown) return;
    this.shown = shown;
    this.page.replaceChildren(told.error ? make("p", { class: "empty" }, told.error) : this.table(told));
  }

  table({ keys, differing, rows }) {
    const names = Object.keys(RUN_FIGURES).filter((name) => rows.some(({ figures }) => name in figures));
    const head = ["run", "status", "step", "audit", ...names.map((name) => RUN_FIGURES[name]), ...keys];
    const cell = (title, value, kind = "figure") => make("td", { class: kind, data: { title } }, value);
    const body = rows.map((row) => make("tr", {},
      make("th", { scope: "row" }, swatch(row.run), " ", make("a", { href: `#/run/${row.run}` }, row.label)),
      cell("status", row.status, ""), cell("step", figure(row.step)),
      cell("audit", make("a", { href: `#/run/${row.run}`, class: `verdict ${row.audit ?? ""}` }, row.audit === "none" ? "no findings" : row.audit ?? "–"), ""),
      ...names.map((name) => cell(RUN_FIGURES[name], figure(row.figures[name] ?? null))),
      ...row.settings.map((value, place) => cell(keys[place], make("div", { class: "value", title: value }, value ?? "–"), "setting"))));
    return make("section", { class: "panel runs" },
      make("h3", {}, `${figure(rows.length)} run${rows.length === 1 ? "" : "s"}`,
        make("span", { class: "unit" }, differing ? `${figure(differing)} setting${differing === 1 ? " differs" : "s differ"}${
          differing > keys.length ? `, of which ${keys.length} are shown` : ""}` : "the recipes do not differ")),
      make("div", { class: "scroll" }, make("table", { class: "list" },
        make("thead", {}, make("tr", {}, ...head.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, ...body))));
  }

  update() {
    return this.load();
  }

  leave() {}
}
