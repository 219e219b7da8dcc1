"use strict";

// What differs between the recipes of two runs.

class RecipesPage {
  show(page, given) {
    this.page = page;
    this.given = given.map(decodeURIComponent);
    this.shown = this.compared = "";
    this.choices = make("div", { class: "bar", role: "group", "aria-label": "runs to compare" });
    this.answer = make("div");
    page.replaceChildren(this.choices, this.answer);
    return this.load();
  }

  /** The two runs to compare: the ones of the address, then the first ones, RL before supervised stages. */
  chosen() {
    const runs = lastState?.runs ?? [];
    const ids = this.given.filter((id) => runs.some((run) => run.id === id));
    for (const { id } of [...runs].sort((a, b) => a.supervised - b.supervised)) if (ids.length < 2 && !ids.includes(id)) ids.push(id);
    return ids;
  }

  async load() {
    const chosen = this.chosen();
    if (!lastState) return;
    this.fillChoices(chosen);
    if (chosen.length < 2) {
      this.answer.replaceChildren(make("p", { class: "empty" }, "There is one run. Name several to compare: agentfactory view RUN RUN"));
      return;
    }
    let told;
    try {
      told = await source.recipes(...chosen);
    } catch (error) {
      told = { error: error.message };
    }
    const shown = JSON.stringify([chosen, told]);
    if (current !== this || shown === this.shown || String(chosen) !== String(this.chosen())) return;
    this.shown = shown;
    this.compared = String(chosen);
    this.answer.replaceChildren(told.error ? make("p", { class: "empty" }, told.error) : this.table(chosen, told));
  }

  fillChoices(chosen) {
    const made = JSON.stringify([chosen, lastState.runs.map(({ id, label }) => [id, label])]);
    if (this.made === made && this.choices.children.length) return;
    this.made = made;
    const select = (place) => make("select", { "aria-label": place ? "other run" : "run", on: { change: (event) => {
      const next = [...chosen];
      const taken = next.indexOf(event.target.value);
      if (taken >= 0) next[taken] = next[place]; // the two change places
      next[place] = event.target.value;
      this.go(next);
      this.choices.querySelectorAll("select")[place].focus();
    } } }, ...lastState.runs.map(({ id, label }) => make("option", { value: id, selected: id === chosen[place] }, label)));
    this.choices.replaceChildren(...(chosen.length < 2 ? [] : [select(0), make("span", { class: "note" }, "against"), select(1),
      make("button", { on: { click: () => this.go([...chosen].reverse()) } }, "swap")]));
  }

  go(chosen) {
    this.given = chosen;
    history.replaceState(null, "", `#/recipes/${chosen.map(encodeURIComponent).join("/")}`);
    return this.load();
  }

  table(chosen, { rows, same, labels }) {
    const equal = `${figure(same)} setting${same === 1 ? " is" : "s are"} equal`;
    if (!rows.length) return make("p", { class: "empty" }, `The recipes do not differ: ${equal}.`);
    const cell = (value, place) => make("td", { data: { run: labels[place] } }, value === null
      ? make("span", { class: "note" }, "not set")
      : make("pre", {}, value));
    const head = (id, place) => make("th", { scope: "col" }, swatch(id), " ", make("a", { href: `#/run/${id}` }, labels[place]));
    return make("section", { class: "panel" },
      make("h3", {}, `${figure(rows.length)} setting${rows.length === 1 ? " differs" : "s differ"}`, make("span", { class: "unit" }, equal)),
      make("table", { class: "difference" },
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "setting"), ...chosen.map(head))),
        make("tbody", {}, ...rows.map(({ key, values }) => make("tr", {}, make("th", { scope: "row" }, key || "recipe"), ...values.map(cell))))));
  }

  update() {
    const chosen = this.chosen();
    // a recipe changes only with its run
    return String(chosen) === this.compared ? this.fillChoices(chosen) : this.load();
  }

  leave() {}
}
