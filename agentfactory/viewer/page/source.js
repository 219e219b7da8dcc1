"use strict";

// Sources of the page's data: the server, or the exported file that contains both page and data.

/** Gets data from the server. */
const server = {
  followed: true,
  tag: "",

  async get(path, parameters = {}, headers = {}) {
    const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { headers });
    if (response.status === 304) return null;
    if (response.ok) return response.json();
    const said = await response.json().catch(() => ({})); // an internal error of the viewer is not JSON
    throw new Error(said.error ?? `the viewer answered ${response.status} ${response.statusText}; its terminal says why`);
  },

  /** The current state; null if it has not changed. */
  async state() {
    const response = await fetch("api/state", { headers: { "If-None-Match": this.tag } });
    if (response.status === 304) return null;
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    this.tag = response.headers.get("etag");
    return response.json();
  },

  metrics(run, from, generation) {
    return this.get("api/metrics", { run, from, generation });
  },
  charts() {
    return this.get("api/charts");
  },
  run(run) {
    return this.get("api/run", { run });
  },
  list(query) {
    return this.get("api/trajectories", query);
  },
  rewards(query) {
    return this.get("api/rewards", query);
  },
  recipes(run, other) {
    return this.get("api/recipes", { run, other });
  },
  runs() {
    return this.get("api/runs");
  },
  audit(run) {
    return this.get("api/audit", { run });
  },
  trajectory(run, file, byte, place) {
    return this.get("api/trajectory", { run, file, byte, place });
  },
};

/** Answers from the data of an exported file, as the server would. */
function fileSource(data) {
  let told = false;
  const facts = data.pages.map((page) => page.facts);

  const succeeded = (row) => (row.success === null ? null : row.success >= 1 ? "yes" : "no");

  function matches(row, number, query) {
    const same = { run: "run", source: "source", tasks: "tasks", outcome: "outcome", group: "group_id" };
    for (const [name, column] of Object.entries(same)) if (query[name] && row[column] !== query[name]) return false;
    for (const name of ["version", "step", "reward"]) {
      const low = query[`${name}_min`];
      const high = query[`${name}_max`];
      if (!low && !high) continue;
      if (row[name] === null || (low && row[name] < Number(low)) || (high && row[name] > Number(high))) return false;
    }
    if (query.success && succeeded(row) !== query.success) return false;
    if (query.tool && !row.tools.includes(query.tool)) return false;
    return !query.text || data.texts[number].toLowerCase().includes(query.text.trim().toLowerCase());
  }

  function grouped(rows) {
    const groups = new Map();
    for (const row of rows) {
      const key = `${row.run} ${row.file} ${row.byte}`;
      groups.set(key, [...(groups.get(key) ?? []), row]);
    }
    const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    return [...groups.values()].map((members) => {
      const having = (name) => members.map((member) => member[name]).filter((value) => value !== null);
      const rewards = having("reward");
      return {
        ...members[0],
        chains: members.length,
        reward: mean(rewards),
        lowest: rewards.length ? Math.min(...rewards) : null,
        highest: rewards.length ? Math.max(...rewards) : null,
        success: mean(having("success")),
        turns: mean(having("turns")),
        calls: mean(having("calls")),
        unscored: members.length - rewards.length,
      };
    });
  }

  /** Values with the number of rows that have them. */
  function counts(values) {
    const found = {};
    for (const value of values) found[value] = (found[value] ?? 0) + 1;
    return found;
  }

  const facets = {
    source: counts(facts.map((row) => row.source)),
    outcome: counts(facts.map((row) => row.outcome)),
    tasks: counts(facts.map((row) => row.tasks).filter((name) => name !== null)),
    success: counts(facts.map(succeeded).filter((value) => value !== null)),
    tool: counts(facts.flatMap((row) => row.tools)),
  };

  function list(query) {
    let rows = facts.filter((row, number) => matches(row, number, query));
    if (query.view === "groups") rows = grouped(rows);
    const newest = (query.sort || "newest") === "newest";
    const column = newest ? "version" : query.sort;
    const sign = query.ascending === "1" ? 1 : -1;
    // Array.sort is stable: equal rows stay in reading order, or its reverse
    if (sign < 0) rows.reverse();
    const rank = (row) => row[column] ?? sign * Infinity; // rows without a value come last
    rows.sort((a, b) => (rank(a) === rank(b) ? 0 : sign * (rank(a) < rank(b) ? -1 : 1)));
    const size = Number(query.size || 50);
    const start = size * Number(query.page || 0);
    return { total: rows.length, rows: rows.slice(start, start + size), facets, unsearched: 0 };
  }

  function rewards(query) {
    const { by, steps } = stepsOf(query, "step").steps.first === null ? stepsOf(query, "version") : stepsOf(query, "step");
    return { by, steps, ...rewardBins(facts.filter((row, number) => matches(row, number, query))) };
  }

  /** The first and last step, and those next to the ones asked for. */
  function stepsOf(query, by) {
    const anyStep = { ...query, reward_min: "", reward_max: "", [`${by}_min`]: "", [`${by}_max`]: "" };
    const known = facts.filter((row, number) => row[by] !== null && matches(row, number, anyStep)).map((row) => row[by]);
    const among = (values, most) => (values.length ? values.reduce((a, b) => (most ? Math.max(a, b) : Math.min(a, b))) : null);
    const low = query[`${by}_min`] ? Number(query[`${by}_min`]) : -Infinity;
    const high = query[`${by}_max`] ? Number(query[`${by}_max`]) : Infinity;
    return { by, steps: { first: among(known, false), last: among(known, true),
      before: among(known.filter((step) => step < low), true), after: among(known.filter((step) => step > high), false) } };
  }

  return {
    followed: false,
    held: data.pages.length,
    async state() {
      if (told) return null;
      told = true;
      return data.state;
    },
    async metrics(run) {
      return data.metrics[run];
    },
    async charts() {
      return data.charts;
    },
    async list(query) {
      return list(query);
    },
    async rewards(query) {
      return rewards(query);
    },
    async trajectory(run, file, byte, place) {
      const found = data.pages.find(({ facts: row }) =>
        row.run === run && row.file === file && row.byte === Number(byte) && row.place === Number(place));
      if (!found) throw new Error("this trajectory is not in the file, which holds some of them only");
      return found;
    },
  };
}

const held = document.getElementById("exported");
const source = held ? fileSource(JSON.parse(held.textContent)) : server;
