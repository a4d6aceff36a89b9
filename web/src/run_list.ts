// Runs that are kept, one row each.

import { h } from "./dom";
import { section } from "./frame";
import type { RunLine } from "./live_data";
import { dayAndTime } from "./live_words";
import { duration } from "./report_words";

const HEAD = ["Started", "Lasted", "How it went", "Command"];

export function runTable(runs: RunLine[]): HTMLElement {
  return h(
    "table",
    { class: "listing runs" },
    h("thead", {}, h("tr", {}, ...HEAD.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...runs.map(rowOf)),
  );
}

function rowOf(run: RunLine): HTMLElement {
  const address = `?run=${encodeURIComponent(run.id)}`;
  const cells: [string, Node | string][] = [
    ["Started", h("a", { href: address }, dayAndTime(run.started_at))],
    ["Lasted", duration(run.duration_s)],
    ["How it went", h("span", { class: `how ${toneOf(run)}` }, run.how)],
    ["Command", h("code", { title: run.command.join(" ") }, run.command.join(" "))],
  ];
  return h(
    "tr",
    { "data-run": run.id },
    ...cells.map(([name, value]) => h("td", { "data-name": name }, value)),
  );
}

function toneOf({ state, exit_code, out_of_memory }: RunLine): string {
  if (state === "running") return "good";
  if (state === "unknown") return "look";
  return out_of_memory || exit_code ? "bad" : "plain";
}

export function showRuns(root: HTMLElement, runs: RunLine[], count: number): void {
  document.title = "Runs · oomph";
  const left = count - runs.length;
  root.replaceChildren(
    h(
      "main",
      {},
      h(
        "header",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, "oomph serve"), " runs"),
        h("h1", {}, titleOf(runs, count)),
        h("p", { class: "given" }, "What ", h("code", {}, "oomph watch -- COMMAND"), " has kept."),
      ),
      runs.length ? section("Runs", runTable(runs)) : null,
      left > 0 ? h("p", { class: "note" }, `and ${left} older ones: oomph runs`) : null,
    ),
  );
}

function titleOf(runs: RunLine[], count: number): string {
  if (!count) return "No run is kept yet";
  const running = runs.filter(({ state }) => state === "running").length;
  const all = `${count} ${count === 1 ? "run" : "runs"}`;
  return running ? `${all}, ${running} under way` : all;
}
