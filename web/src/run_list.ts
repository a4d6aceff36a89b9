// Runs that are kept, one row each: sorted by a column, and chosen to be laid over each other.

import { h } from "./dom";
import { section } from "./frame";
import type { RunFigures, RunLine } from "./live_data";
import { dayAndTime } from "./live_words";
import { MOST_OVERLAID } from "./overlaid";
import { duration, percent } from "./report_words";
import { type SortKey, isSortKey, sorted } from "./run_sort";
import { bytes } from "./words";

export type Figures = Record<string, RunFigures>;
type Ask = () => Promise<{ figures: Figures; num_left: number }>;

const HEAD: [string, SortKey | null][] = [
  ["Started", "started"],
  ["Lasted", "lasted"],
  ["Peak", "peak"],
  ["Active", "active"],
  ["How it went", null],
  ["Command", null],
];
const AGAIN_S = 2.5; // the server keeps an answer for two

/** The runs as they come, without figures: for those under way. */
export function runTable(runs: RunLine[]): HTMLElement {
  const shown = HEAD.filter(([name]) => name !== "Peak" && name !== "Active");
  return h(
    "table",
    { class: "listing runs" },
    h("thead", {}, h("tr", {}, ...shown.map(([name]) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...runs.map((run) => rowOf(run, null, null))),
  );
}

function rowOf(run: RunLine, figures: RunFigures | null, box: HTMLElement | null): HTMLElement {
  const address = `?run=${encodeURIComponent(run.id)}`;
  const command = run.command.join(" ");
  const cells: [string, Node | string][] = [
    ...(box ? [["Choose", box] as [string, Node]] : []),
    ["Started", h("a", { href: address }, dayAndTime(run.started_at))],
    ["Lasted", duration(run.duration_s)],
    ...(figures
      ? ([
          ["Peak", peakOf(figures)],
          ["Active", figures.busy_ratio === null ? "unknown" : percent(figures.busy_ratio)],
        ] as [string, string][])
      : []),
    ["How it went", h("span", { class: `how ${toneOf(run)}` }, run.how)],
    ["Command", h("code", { title: command }, command)],
  ];
  return h(
    "tr",
    { "data-run": run.id },
    ...cells.map(([name, value]) => h("td", { "data-name": name }, value)),
  );
}

export function peakOf({ peak_bytes, total_bytes }: RunFigures): string {
  if (peak_bytes === null) return "unknown";
  const share = total_bytes ? ` (${percent(peak_bytes / total_bytes)})` : "";
  return bytes(peak_bytes) + share;
}

function toneOf({ state, exit_code, out_of_memory }: RunLine): string {
  if (state === "running") return "good";
  if (state === "unknown") return "look";
  return out_of_memory || exit_code ? "bad" : "plain";
}

export function showRuns(
  root: HTMLElement,
  runs: RunLine[],
  count: number,
  asked: URLSearchParams,
  ask: Ask,
): void {
  document.title = "Runs · oomph";
  const left = count - runs.length;
  const list = runs.length ? runChoice(runs, asked, ask) : null;
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
      list,
      left > 0 ? h("p", { class: "note" }, `and ${left} older ones: oomph runs`) : null,
    ),
  );
}

/** A table that is sorted by its heads, with a box in each row. */
function runChoice(runs: RunLine[], asked: URLSearchParams, ask: Ask): HTMLElement {
  const given = asked.get("sort");
  let by: SortKey = isSortKey(given) ? given : "started";
  let isUp = asked.get("up") !== null;
  let figures: Figures = {};
  const chosen = new Set<string>();
  const body = h("tbody", {});
  const unknown: RunFigures = { peak_bytes: null, total_bytes: null, busy_ratio: null };
  const boxes = new Map(runs.map((run) => [run.id, boxOf(run)]));
  const lay = h("button", { type: "button", class: "copy" });
  const hint = h("span", { class: "rest" });

  const fill = (): void => {
    const rows = sorted(runs, figures, by, isUp);
    body.replaceChildren(
      ...rows.map((run) => rowOf(run, figures[run.id] ?? unknown, boxes.get(run.id) ?? null)),
    );
    heads.forEach(({ cell, key }) => {
      if (!key) return;
      if (key === by) cell.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  };
  const count = (): void => {
    const isFull = chosen.size >= MOST_OVERLAID;
    boxes.forEach((box, id) => (box.disabled = isFull && !chosen.has(id)));
    lay.disabled = chosen.size < 2;
    lay.textContent = chosen.size < 2 ? "Lay over each other" : `Lay ${chosen.size} runs over each other`;
    hint.textContent = isFull
      ? `${MOST_OVERLAID} at most`
      : chosen.size < 2
        ? "Choose two runs or more"
        : "";
  };
  function boxOf(run: RunLine): HTMLInputElement {
    const label = `the run of ${dayAndTime(run.started_at)}`;
    const box = h("input", { type: "checkbox", "aria-label": label });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      count();
    });
    return box;
  }
  const heads = HEAD.map(([name, key]) => ({ key, cell: headOf(name, key, () => sortBy(key)) }));
  function sortBy(key: SortKey | null): void {
    if (!key) return;
    isUp = key === by && !isUp;
    by = key;
    history.replaceState(null, "", `?runs&sort=${by}${isUp ? "&up" : ""}`);
    fill();
  }
  lay.addEventListener("click", () => {
    const inOrder = runs.filter(({ id }) => chosen.has(id)).map(({ id }) => encodeURIComponent(id));
    location.search = `?compare=${inOrder.join(",")}`;
  });
  const keepAsking = async (): Promise<void> => {
    for (;;) {
      const answer = await ask();
      figures = answer.figures;
      fill();
      if (!answer.num_left) return;
      await new Promise((resolve) => setTimeout(resolve, 1000 * AGAIN_S));
    }
  };
  fill();
  count();
  keepAsking().catch(() => {
    hint.textContent = "The server is away: peaks and activity are not known.";
  });
  const table = h(
    "table",
    { class: "listing runs can-sort" },
    h(
      "thead",
      {},
      h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Choose")), ...heads.map(({ cell }) => cell)),
    ),
    body,
  );
  return section("Runs", h("p", { class: "choice" }, lay, hint), table);
}

function headOf(name: string, key: SortKey | null, onClick: () => void): HTMLElement {
  const cell = h("th", { scope: "col" });
  cell.append(key ? h("button", { type: "button", class: "sort", click: onClick }, name) : name);
  return cell;
}

function titleOf(runs: RunLine[], count: number): string {
  if (!count) return "No run is kept yet";
  const running = runs.filter(({ state }) => state === "running").length;
  const all = `${count} ${count === 1 ? "run" : "runs"}`;
  return running ? `${all}, ${running} under way` : all;
}
