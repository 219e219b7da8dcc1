"use strict";

// The current page, the selected runs, and polling for new data.

let lastState = null;
const hidden = new Set();
const pages = { curves: new CurvesPage(), trajectories: new ListPage(), trajectory: new TrajectoryPage(), run: new RunPage(),
  recipes: new RecipesPage(), runs: new RunsPage() };
let current = null;

/** The runs to show curves of. */
function shownRuns() {
  return (lastState?.runs ?? []).filter((run) => !hidden.has(run.id));
}

/** Whether runs are compared: their supervised stages, which only prepare, are folded. */
function isComparing() {
  const folders = new Set(lastState.runs.map((run) => run.folder));
  return folders.size > 1 && lastState.runs.some((run) => !run.supervised);
}

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const next = pages[name] ?? pages.curves;
  current?.leave();
  current = next;
  for (const link of document.querySelectorAll("header nav a")) {
    const chosen = link.hash === `#/${name || "curves"}` || (name === "trajectory" && link.hash === "#/trajectories");
    link.toggleAttribute("aria-current", chosen);
  }
  document.body.dataset.page = pages[name] ? name : "curves";
  scrollTo(0, 0);
  return next.show(document.getElementById("page"), rest, new URLSearchParams(query ?? ""));
}

function drawRuns(state) {
  const chip = (run) => {
    const box = make("input", { type: "checkbox", checked: !hidden.has(run.id), on: { change: () => {
      if (box.checked) hidden.delete(run.id); else hidden.add(run.id);
      if (current === pages.curves) pages.curves.redraw();
    } } });
    const best = run.best && `best checkpoint: step ${run.best.step}, ${run.best.metric} ${figure(run.best.value)}`;
    const said = [run.status, run.step === null ? "" : `step ${run.step}`, run.chains ? `${figure(run.chains)} trajectories` : "", best];
    const label = source.followed ? make("a", { href: `#/run/${run.id}`, title: "summary and recipe" }, run.label) : make("span", {}, run.label);
    return make("span", { class: "run", data: { run: run.id } }, make("label", {}, box, swatch(run.id)), label,
      make("span", { class: "note" }, said.filter(Boolean).join(", ")));
  };
  const folded = isComparing() ? state.runs.filter((run) => run.supervised) : [];
  const unfolded = document.querySelector("#runs details")?.open;
  document.getElementById("runs").replaceChildren(...state.runs.filter((run) => !folded.includes(run)).map(chip),
    folded.length ? make("details", { open: unfolded }, make("summary", {}, `SFT stages (${folded.length})`), ...folded.map(chip)) : "");
  const problems = state.runs.flatMap((run) => run.problems.map((problem) => `${run.label}: ${problem}`));
  const box = document.getElementById("problems");
  box.hidden = !problems.length;
  box.replaceChildren(...problems.map((problem) => make("div", {}, problem)));
}

function drawStatus(text, bad = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

/** Poll for new data while the page is visible. */
async function follow() {
  try {
    const state = document.hidden ? null : await source.state();
    if (state) {
      lastState = state;
      state.runs.forEach((run) => colourOf(run.id)); // in order, regardless of which one a page draws first
      drawRuns(state);
      await (current ? current.update(state) : route());
    }
    const { read, total } = lastState?.progress ?? { read: 0, total: 0 };
    drawStatus(!source.followed ? "exported" : read < total ? `reading trajectories, ${Math.floor((100 * read) / total)} %` : "live");
  } catch (error) {
    console.warn(error);
    source.tag = ""; // request the state again, because it could not be processed
    drawStatus(lastState ? "the viewer has ended, or cannot be reached" : String(error.message), true);
  }
  if (source.followed) setTimeout(follow, lastState && lastState.progress.read < lastState.progress.total ? 200 : 600);
}

// an exported file has no recipes
for (const link of document.querySelectorAll("nav .served")) link.hidden = !source.followed;
addEventListener("hashchange", route);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current === pages.curves && pages.curves.redraw());
follow();
