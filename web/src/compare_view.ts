// Runs laid over each other: the same charts as a report's, with a line for each run.

import { type ChartOptions, type RunChart, runChart } from "./charts";
import { h } from "./dom";
import { printWell, section } from "./frame";
import { dayAndTime } from "./live_words";
import { type Overlaid, differences, overlaid, stepsOf } from "./overlaid";
import type { ReportPage, Series } from "./report_data";
import { duration, percent, seconds } from "./report_words";
import { has, inGib } from "./reports";

type Look = Pick<ChartOptions, "title" | "value" | "axis" | "highest">;

export function showCompared(root: HTMLElement, reports: ReportPage[]): void {
  const runs = overlaid(reports);
  document.title = `${runs.length} runs · oomph`;
  const charts = chartsOf(runs);
  root.replaceChildren(
    h(
      "main",
      {},
      h(
        "header",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, "oomph serve"), " runs, from the start of each"),
        h("h1", {}, `${runs.length} runs over each other`),
        h("p", { class: "given" }, "Of each run, the GPU that was fullest."),
      ),
      section("Runs", tableOf(runs)),
      charts.length
        ? section(
            "Over time",
            h("div", { class: "run-charts" }, ...charts.map(({ element }) => element)),
            h(
              "p",
              { class: "note hint" },
              "Drag across a chart to zoom, double-click for the whole runs. Lines are means of each moment.",
            ),
          )
        : h("p", { class: "note" }, "Nothing was sampled that could be drawn."),
    ),
  );
  const redraw = (): void => charts.forEach((chart) => chart.redraw());
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  printWell(redraw);
}

function chartsOf(runs: Overlaid[]): RunChart[] {
  const watts = (power: number): string => `${Math.round(power)} W`;
  return [
    chartOf(runs, ({ page }) => page?.busy_series ?? null, {
      title: "Kernel-active time",
      value: percent,
      axis: percent,
      highest: 1.02,
    }),
    chartOf(runs, ({ page }) => (page ? inGib(page.memory_series) : null), {
      title: "Memory in use",
      value: (size) => `${size.toFixed(1)} GiB`,
      axis: (size) => `${size} GiB`,
      highest: null,
    }),
    chartOf(runs, ({ page }) => page?.power_series ?? null, {
      title: "Power",
      value: watts,
      axis: watts,
      highest: null,
    }),
    chartOf(runs, stepsOf, { title: "Time of a step", value: seconds, axis: seconds, highest: null }),
  ].filter((chart) => chart !== null);
}

function chartOf(
  runs: Overlaid[],
  seriesOf: (run: Overlaid) => Series | null,
  look: Look,
): RunChart | null {
  const lines = runs.flatMap((run) => {
    const series = seriesOf(run);
    return series && has(series) ? [{ name: run.name, series, colour: run.colour }] : [];
  });
  if (!lines.length) return null;
  const lasted = Math.max(...runs.map(({ data }) => data.report.lasted_s));
  const none = { rules: [], gaps: [], halts: [], phases: [], marks: [], note: "" };
  return runChart({ ...none, ...look, lines, lasted, isOverlaid: true });
}

function tableOf(runs: Overlaid[]): HTMLElement {
  const head = ["Run", "Started", "Lasted", "Peak", "Active", "Power", "What differs"];
  const words = differences(runs.map(({ data }) => data.report.command));
  return h(
    "table",
    { class: "listing runs compared" },
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...runs.map((run, place) => rowOf(run, words[place] ?? ""))),
  );
}

function rowOf({ name, colour, data, page }: Overlaid, differs: string): HTMLElement {
  const { report } = data;
  const label = h("b", { class: "key-word" }, name);
  label.style.setProperty("--key", `var(--${colour})`);
  const command = report.command.join(" ");
  const cells: [string, Node | string][] = [
    ["Run", label],
    ["Started", h("a", { href: `?run=${encodeURIComponent(report.run)}` }, dayAndTime(report.started_at))],
    ["Lasted", duration(report.lasted_s)],
    ["Peak", page?.peak ?? "unknown"],
    ["Active", page?.busy ?? "unknown"],
    ["Power", page?.power ?? "unknown"],
    ["Command", h("code", { title: command }, differs || command)],
  ];
  return h("tr", {}, ...cells.map(([key, value]) => h("td", { "data-name": key }, value)));
}
