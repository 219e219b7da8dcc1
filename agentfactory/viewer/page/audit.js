"use strict";

// The findings of the last audit of a run; each opens its chains at the tokens.

/** The panel with the last audit of a run. */
function auditPanel({ path, report }) {
  const command = commandBox(`agentfactory audit ${quoted(path)}`);
  const title = make("h3", {}, "Audit");
  if (!report) {
    return make("section", { class: "panel", id: "audit" }, title,
      make("p", { class: "note" }, "This run has not been audited. The command checks its tokens, rewards, weights and tasks:"), command);
  }
  const list = (found) => (Array.isArray(found) ? found : []);
  const unchecked = list(report.unchecked).map(({ topic, why }) => [topic, why]);
  const facts = (name, entries) => (entries.length ? make("details", {}, make("summary", {}, `${name} (${entries.length})`),
    make("dl", { class: "facts" }, ...entries.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, String(value))]))) : null);
  return make("section", { class: "panel", id: "audit" }, title,
    make("p", {}, report.conclusion ?? ""),
    ...list(report.findings).map(findingCard),
    facts("looked at", Object.entries(report.looked_at ?? {})), facts("not checked", unchecked),
    make("details", {}, make("summary", {}, "audit again"), command));
}

function findingCard({ severity, topic, text, fix, evidence }) {
  return make("article", { class: `finding ${["wrong", "warning"].includes(severity) ? severity : "note"}` },
    make("p", {}, make("strong", {}, String(severity)), ` · ${topic}: ${text}`),
    make("ul", {}, ...(Array.isArray(evidence) ? evidence : []).map(evidenceItem)),
    fix ? make("p", { class: "note" }, `fix: ${fix}`) : null);
}

function evidenceItem({ text, chain, group, row, position, file, link }) {
  const place = [chain || (group && `group ${group}`), row ? `row ${row + 1}` : "", Number.isInteger(position) ? `token ${position}` : "",
    link ? "" : file].filter(Boolean).join(", ");
  const at = Number.isInteger(position) ? `?${new URLSearchParams({ tab: "tokens", row: row ?? 0, token: position })}` : "";
  return make("li", {}, link ? make("a", { href: `${addressOf(link)}${at}` }, place) : make("span", { class: "note" }, place),
    place && text ? ": " : "", text ?? "");
}
