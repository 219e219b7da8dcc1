"use strict";

// One trajectory: its messages, its rewards, and its tokens.

class TrajectoryPage {
  async show(page, place, parameters) {
    this.page = page;
    this.parameters = parameters;
    const [run, file, byte, number] = place.map(decodeURIComponent);
    // a page that comes at once replaces the one before it without a flicker
    const slow = setTimeout(() => this.isShown(parameters) && page.replaceChildren(loadingSign("the trajectory")), 150);
    let data;
    try {
      data = await source.trajectory(run, file, byte, number).finally(() => clearTimeout(slow));
    } catch (error) {
      if (this.isShown(parameters)) page.replaceChildren(make("p", { class: "empty" }, error.message));
      return;
    }
    if (!this.isShown(parameters)) return;
    this.data = data;
    this.pane = make("div", { class: "pane" });
    this.tabs = make("div", { class: "tabs", role: "tablist" });
    page.replaceChildren(this.head(), make("div", { class: "columns" },
      make("div", { class: "told" }, this.tabs, this.pane), this.side()));
    this.open(parameters.get("tab") ?? "conversation");
  }

  /** Whether this page still shows the same trajectory after waiting for an answer. */
  isShown(parameters) {
    return current === this && this.parameters === parameters;
  }

  head() {
    const { facts, group, label } = this.data;
    const members = group.map((member) => make("a", {
      href: `${addressOf({ ...facts, place: member.place })}${location.hash.includes("?") ? `?${location.hash.split("?")[1]}` : ""}`,
      class: "member", title: `${member.chain}: ${member.outcome}`,
      "aria-current": member.place === facts.place ? "page" : null,
    }, figure(member.reward)));
    return make("div", { class: "headline" },
      make("h1", {}, swatch(facts.run), facts.chain, outcomeChip(facts.outcome)),
      make("p", { class: "note" }, `${label}, ${facts.source}`, facts.version === null ? "" : `, weights ${facts.version}`,
        facts.step === null ? "" : `, trained in step ${facts.step}`),
      members.length > 1 ? make("nav", { class: "members", "aria-label": "chains of the group" },
        make("span", { class: "note" }, `rewards of group ${facts.group_id}`), ...members, this.equalRewards()) : null);
  }

  /** Says that the rewards of a group are equal, and whether the trainer's advantages are therefore 0. */
  equalRewards() {
    const { group, rows } = this.data;
    if (group[0].reward === null || group.some(({ reward }) => reward !== group[0].reward)) return null;
    const credited = rows.flatMap((row) => row.advantage ?? []).filter((value) => value !== null);
    const none = credited.length > 0 && credited.every((value) => value === 0);
    return make("span", { class: "note" }, none ? "all rewards equal: no gradient" : "all rewards equal");
  }

  open(tab) {
    const frames = framesOf(this.data.messages);
    const tabs = { conversation: () => this.conversation(), ...(frames.length ? { film: () => this.film(frames) } : {}),
      tokens: () => this.tokens(), time: () => this.time(), task: () => this.task() };
    const chosen = tabs[tab] ? tab : "conversation";
    this.tabs.replaceChildren(...Object.keys(tabs).map((name) => make("button", {
      role: "tab", "aria-selected": String(name === chosen), on: { click: () => {
        this.note({ tab: name });
        this.open(name);
      } } }, name)));
    this.pane.replaceChildren(tabs[chosen]());
  }

  /** Keep the current view in the URL. */
  note(change) {
    for (const [name, value] of Object.entries(change)) this.parameters.set(name, value);
    history.replaceState(null, "", `${location.hash.split("?")[0]}?${this.parameters}`);
  }

  conversation() {
    const { messages, turn_rewards: rewards, replays, path, facts } = this.data;
    const more = (turn) => ({ effect: effectOf(replays, turn), replay: path ? replayButton(path, facts.chain, turn) : [] });
    return make("div", { class: "conversation" }, ...messages.map((message) => messageCard(message, rewards, more)));
  }

  tokens() {
    const view = new TokenView(this.data, this.parameters.get("colour"), (colour) => this.note({ colour }));
    view.colour();
    if (this.parameters.has("token")) view.point(Number(this.parameters.get("row") ?? 0), Number(this.parameters.get("token")));
    return view.element;
  }

  film(frames) {
    return filmStrip(frames, (turn) => this.goTo(turn));
  }

  time() {
    return new Waterfall(this.data, (turn) => this.goTo(turn)).element;
  }

  /** Show the messages of a turn. */
  goTo(turn) {
    this.note({ tab: "conversation" });
    this.open("conversation");
    const message = this.pane.querySelector(`[data-turn="${turn}"]`);
    message?.focus();
    message?.scrollIntoView({ block: "center" });
  }

  task() {
    return make("section", { class: "panel" }, make("h3", {}, "Task"), make("pre", {}, JSON.stringify(this.data.task, null, 2)));
  }

  side() {
    const { facts, metrics, turn_rewards: turns, workspaces, replays, path } = this.data;
    const table = (rows) => make("dl", { class: "facts" }, ...rows.flatMap(([name, value]) =>
      [make("dt", {}, name), make("dd", {}, typeof value === "number" ? figure(value) : String(value ?? "–"))]));
    const parts = Object.entries(metrics).filter(([name]) => name.startsWith("reward/"));
    const limits = Object.entries(metrics).filter(([name, value]) => name.startsWith("limits/") && value);
    const rewards = [["reward", facts.reward], ...(facts.success === null ? [] : [["success", facts.success]]),
      ...parts.map(([name, value]) => [`${name.slice(7)}, before its weight`, value]),
      ...(metrics.penalty ? [["penalty, taken off", metrics.penalty]] : []),
      ...(turns ?? []).map((value, number) => [`turn ${number + 1}`, value])];
    const ending = [["outcome", facts.outcome], ["stop reason", facts.stop ?? "–"],
      ...limits.map(([name, value]) => [`limit ${name.slice(7)} reached`, value]),
      ...(facts.error ? [["error", facts.error]] : []), ["turns", facts.turns], ["calls", facts.calls],
      ["tokens", facts.tokens], ["sampled tokens", facts.sampled], ["seconds", facts.seconds],
      ...workspaces.map((folder) => ["folder", folder])];
    const shown = new Set(["penalty", "success", "tool_calls", "sampled_tokens", ...parts.map(([name]) => name)]);
    const others = Object.entries(metrics).filter(([name]) => !shown.has(name));
    const some = others.filter(([, value]) => value !== 0);
    const none = others.filter(([, value]) => value === 0);
    return make("aside", {},
      make("section", { class: "panel", id: "reward" }, make("h3", {}, "Reward"), table(rewards)),
      make("section", { class: "panel", id: "ending" }, make("h3", {}, "Ending"), table(ending)),
      replays.length || path ? replayPanel(replays, path, facts.chain) : null,
      make("section", { class: "panel", id: "metrics" }, make("h3", {}, "Metrics"), table(some),
        none.length ? make("details", {}, make("summary", {}, `${none.length} are 0`), table(none)) : null));
  }

  update() {}

  leave() {
    showTip(null);
  }
}

/** One message with its calls, its images and the extra information of a tool. `more` gives what is known of a turn. */
function messageCard(message, rewards, more) {
  const { role, name, parts, reasoning, calls, info, turn } = message;
  const spoken = turn !== undefined && turn >= 0;
  const unit = (text) => [" ", make("span", { class: "unit" }, text)];
  const { effect, replay } = spoken ? more(turn) : { effect: null, replay: [] };
  return make("article", { class: `message ${role}`, tabindex: spoken ? -1 : null, data: spoken ? { turn } : {} },
    make("h4", {}, name ? `${role}: ${name}` : role, spoken ? unit(`turn ${turn + 1}`) : [],
      spoken && rewards ? unit(`reward ${figure(rewards[turn])}`) : [],
      effect === null ? [] : [" ", make("span", { class: `effect ${effect < 0 ? "loss" : "gain"}`,
        title: "change of the expected result that this turn made" }, `effect ${effect < 0 ? "−" : "+"}${Math.abs(effect).toFixed(2)}`)],
    ),
    reasoning ? make("details", {}, make("summary", {}, "reasoning"), make("div", { class: "text" }, reasoning)) : null,
    ...parts.map((part) => part.image ? picture(part, name ?? role) : make("div", { class: "text" }, part.text)),
    ...calls.map(callCard),
    ...replay,
    info ? make("details", {}, make("summary", {}, "info, which the model does not see"), make("pre", {}, JSON.stringify(info, null, 2))) : null);
}

/** An image, with the boxes in which tools were asked to look. */
function picture({ image, boxes }, of) {
  const frames = boxes.map(([left, top, right, bottom]) => {
    const frame = make("span", { class: "box" });
    const share = (part) => `${100 * part}%`;
    Object.assign(frame.style, { left: share(left), top: share(top), width: share(right - left), height: share(bottom - top) });
    return frame;
  });
  return make("div", { class: "picture" }, make("img", { src: image, alt: `image of ${of}`, loading: "lazy" }), ...frames);
}

/** A call; multi-line text arguments, such as code, are shown verbatim. */
function callCard({ name, arguments: given }) {
  const entries = given !== null && typeof given === "object" && !Array.isArray(given) ? Object.entries(given) : [["", given]];
  return make("div", { class: "call" }, make("div", { class: "call-name" }, name),
    entries.length ? make("dl", { class: "facts" }, ...entries.flatMap(([key, value]) => {
      const text = typeof value === "string" && value.includes("\n") ? value : JSON.stringify(value, null, 2);
      return [make("dt", {}, key), make("dd", {}, make("pre", {}, text ?? ""))];
    })) : null);
}

/** A run's best checkpoint, summary and recipe. */
class RunPage {
  show(page, [run]) {
    this.page = page;
    this.run = run;
    this.shown = "";
    return this.load();
  }

  async load() {
    const run = this.run;
    let told;
    try {
      const [about, audit] = await Promise.all([source.run(run), source.audit(run).catch((error) => ({ problem: error.message }))]);
      told = { ...about, audit };
    } catch (error) {
      told = { error: error.message };
    }
    const shown = JSON.stringify(told);
    if (current !== this || this.run !== run || this.shown === shown) return;
    this.shown = shown;
    this.page.replaceChildren(...(told.error ? [make("p", { class: "empty" }, told.error)] : this.parts(told)));
  }

  parts({ label, path, best, summary, recipe, audit }) {
    const panel = (title, ...inside) => make("section", { class: "panel" }, make("h3", {}, title), ...inside);
    const facts = best && [["step", figure(best.step)], [best.metric, figure(best.value)], ["folder", best.path]];
    return [
      make("div", { class: "headline" }, make("h1", {}, swatch(this.run), label), make("p", { class: "note" }, path)),
      best && panel("Best checkpoint", make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) =>
        [make("dt", {}, name), make("dd", {}, value)]))),
      audit.problem ? panel("Audit", make("p", { class: "note" }, audit.problem)) : auditPanel(audit),
      panel("Summary", Object.keys(summary).length ? make("pre", {}, JSON.stringify(summary, null, 2))
        : make("p", { class: "note" }, "It is written when the run has ended.")),
      panel("Recipe", lastState.runs.length > 1 ? make("p", {}, make("a", { href: `#/recipes/${this.run}` }, "differences from another run")) : "",
        make("pre", {}, recipe)),
    ].filter(Boolean);
  }

  update() {
    return this.load();
  }

  leave() {}
}
