// A report, shown inside any element: what a page has in its data, or what a server sent.

import { type RunChart, runChart } from "./charts";
import { h } from "./dom";
import { capital, findingsOf } from "./findings";
import { bringIntoSight, fold, pairs, printWell, section, tile } from "./frame";
import type { Gpu, GpuPage, Halt, Mark, Report, ReportPage, Series } from "./report_data";
import { duration, percent, seconds } from "./report_words";
import type { Rule } from "./run_overlays";
import { gib, toGib } from "./words";

export interface Shown {
  place(): number; // of the GPU that is chosen
  end(): void; // it is to be shown anew: this one listens to nothing any more
}

export function showReport(root: HTMLElement, data: ReportPage, chosen = 0): Shown {
  const { report, words } = data;
  const title = capital(report.findings[0]?.sentence ?? "");
  document.title = `${title} · ${report.run}`;
  const tiles = h("div", { class: "tiles" });
  const charts = h("div", { class: "run-charts" });
  const more = h("div", {});
  let drawn: RunChart[] = [];
  const ending = new AbortController();
  let at = 0;
  const choose = (place: number): void => {
    at = place;
    const [gpu, page] = [report.gpus[place], data.gpus[place]];
    tiles.replaceChildren(...tilesOf(data, gpu, page));
    drawn = [...(gpu && page ? gpuCharts(data, gpu, page) : []), ...otherCharts(data, gpu)];
    charts.replaceChildren(...drawn.map((chart) => chart.element));
    if (!drawn.length)
      charts.replaceChildren(h("p", { class: "note" }, "Nothing was sampled that could be drawn."));
    more.replaceChildren(...gapsOf(gpu));
    drawn.forEach((chart) => chart.redraw());
    pills.forEach((pill, i) => pill.setAttribute("aria-pressed", String(i === place)));
    bringIntoSight(pills[place]);
  };
  const pills = report.gpus.map((gpu, place) =>
    pill(gpu, data.gpus[place], place, () => choose(place)),
  );
  root.replaceChildren(
    h(
      "main",
      {},
      headOf(data, title),
      section(
        "Findings",
        h("ul", { class: "findings" }, ...findingsOf(report.findings, words.whose)),
      ),
      pills.length > 1 ? h("nav", { class: "pills", "aria-label": "GPUs" }, ...pills) : null,
      tiles,
      section(
        "Over time",
        charts,
        h(
          "p",
          { class: "note hint" },
          "Drag across a chart to zoom, double-click for the whole run. Light bands reach from the lowest to the highest of each moment.",
        ),
      ),
      more,
      h("div", { class: "folds" }, ...foldsOf(data)),
      h(
        "footer",
        {},
        `oomph ${data.version}. Kernel-active time is the share of the time with at least one kernel running: it does not tell how much of the GPU each kernel fills.`,
      ),
    ),
  );
  choose(Math.min(chosen, Math.max(report.gpus.length - 1, 0)));
  const redraw = (): void => drawn.forEach((chart) => chart.redraw());
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", redraw, { signal: ending.signal });
  printWell(redraw, ending.signal);
  return { place: () => at, end: () => ending.abort() };
}

const headOf = ({ report, words }: ReportPage, title: string): HTMLElement =>
  h(
    "header",
    {},
    h("p", { class: "eyebrow" }, h("b", {}, "oomph report"), ` ${report.run}`),
    h("h1", {}, title),
    h("p", { class: "why" }, h("code", {}, report.command.join(" "))),
    h("p", { class: "given" }, words.circumstances),
  );

function pill(
  gpu: Gpu,
  page: GpuPage | undefined,
  place: number,
  onClick: () => void,
): HTMLButtonElement {
  return h(
    "button",
    { type: "button", class: "pill", "data-gpu": place, "aria-pressed": "false", click: onClick },
    h("b", {}, `GPU ${gpu.index}`, gpu.rank === null ? "" : `, rank ${gpu.rank}`),
    h("span", {}, `${page?.busy ?? "?"} active · ${page?.peak ?? "?"}`),
  );
}

/** Where the steps of a GPU's rank stand; those of the first rank where it is not known. */
const stepsOf = ({ steps }: ReportPage, gpu: Gpu | undefined): number =>
  Math.max(
    steps.findIndex(({ rank }) => rank === gpu?.rank),
    0,
  );

function tilesOf(data: ReportPage, gpu: Gpu | undefined, page: GpuPage | undefined): HTMLElement[] {
  const [steps, ...more] = (data.words.steps[stepsOf(data, gpu)] ?? "").split(", ");
  return [
    tile("Peak memory", page?.peak ?? "unknown", page?.peak_note ?? ""),
    tile("Kernel-active time", page?.busy ?? "unknown", page?.busy_note ?? ""),
    tile("Steps", steps || "not reported", more.join(", ") || (steps ? "" : "the script did not say")),
    tile("Power", page?.power ?? "unknown", `stood still: ${page?.idle ?? "unknown"}`),
  ];
}

// ---- charts ------------------------------------------------------------------------------------

/** So that the marks of the axis are round in GiB. */
export const inGib = ({ times, low, mean, high }: Series): Series => {
  const scaled = (values: (number | null)[]): (number | null)[] =>
    values.map((value) => (value === null ? null : toGib(value)));
  return { times, low: scaled(low), mean: scaled(mean), high: scaled(high) };
};

const notes = (own: string | false | 0, halts: Halt[]): string =>
  [own, halts.length && "Hatched: the command was halted; not counted in any step."]
    .filter(Boolean)
    .join(" ");

export const has = (series: Series): boolean => series.times.length > 0;

function gpuCharts({ report }: ReportPage, gpu: Gpu, page: GpuPage): RunChart[] {
  const { lasted_s: lasted, halts } = report;
  const own = { gaps: gpu.busy?.gaps ?? [], lasted, halts, phases: [], marks: [] };
  const phases = report.phases.filter(({ rank }) => rank === null || rank === (gpu.rank ?? 0));
  const marks = report.marks.filter((mark) => mark.gpu === null || mark.gpu === gpu.gpu);
  const found: RunChart[] = [];
  if (has(page.busy_series))
    found.push(
      runChart({
        ...own,
        phases,
        marks,
        title: "Kernel-active time",
        note: notes(own.gaps.length && "Shaded: the GPU stood still for two seconds and more.", halts),
        lines: [{ name: "active", series: page.busy_series, colour: "s-busy" }],
        value: percent,
        axis: percent,
        highest: 1.02,
        rules: [],
      }),
    );
  if (has(page.memory_series)) found.push(memoryChart(report, marks, gpu, page));
  if (has(page.power_series)) found.push(powerChart(report, gpu, page));
  return found;
}

function memoryChart(report: Report, marks: Mark[], gpu: Gpu, page: GpuPage): RunChart {
  const { total_bytes, peak_bytes, peak_source } = gpu.memory;
  const rules: Rule[] = [];
  if (total_bytes !== null)
    rules.push({ value: toGib(total_bytes), text: `all ${gib(total_bytes)} GiB`, colour: "limit" });
  if (peak_bytes !== null)
    rules.push({
      value: toGib(peak_bytes),
      text: `peak ${gib(peak_bytes)} GiB, ${peak_source === "polled" ? "as polled" : "exact"}`,
      colour: "ink",
      dashed: true,
    });
  return runChart({
    lasted: report.lasted_s,
    halts: report.halts,
    marks,
    rules,
    gaps: [],
    phases: [],
    title: "Memory in use",
    note: "",
    lines: [{ name: "used", series: inGib(page.memory_series), colour: "s-memory", filled: true }],
    value: (size) => `${size.toFixed(1)} GiB`,
    axis: (size) => `${size} GiB`,
    highest: total_bytes === null ? null : toGib(total_bytes) * 1.08,
  });
}

/** Some GPUs draw more than their limit for a moment: that belongs on the chart, too. */
const mostOf = ({ high, mean }: Series): number[] =>
  [...high, ...mean].filter((value) => value !== null);

function powerChart(report: Report, gpu: Gpu, page: GpuPage): RunChart {
  const limit = gpu.power.limit_w;
  return runChart({
    lasted: report.lasted_s,
    halts: report.halts,
    gaps: [],
    phases: [],
    marks: [],
    title: "Power",
    note: "",
    lines: [{ name: "power", series: page.power_series, colour: "s-power" }],
    value: (power) => `${Math.round(power)} W`,
    axis: (power) => `${Math.round(power)} W`,
    highest: limit === null ? null : 1.15 * Math.max(limit, ...mostOf(page.power_series)),
    rules:
      limit === null
        ? []
        : [{ value: limit, text: `limit ${Math.round(limit)} W`, colour: "muted", dashed: true }],
  });
}

/** Steps of the GPU's rank, and the CPU of the host. */
function otherCharts(data: ReportPage, gpu: Gpu | undefined): RunChart[] {
  const { report, steps, cpu } = data;
  const { lasted_s: lasted, halts } = report;
  const own = { gaps: [], marks: [], phases: [], lasted, halts, rules: [], highest: null };
  const told = steps[stepsOf(data, gpu)];
  const found: RunChart[] = [];
  if (told && has(told.step_series))
    found.push(
      runChart({
        ...own,
        title: steps.length > 1 ? `Time of a step, rank ${told.rank}` : "Time of a step",
        note: notes(has(told.wait_series) && "The filled part is spent waiting for data.", halts),
        lines: [
          { name: "step", series: told.step_series, colour: "s-step" },
          { name: "data", series: told.wait_series, colour: "s-wait", filled: true },
        ].filter(({ series }) => has(series)),
        value: seconds,
        axis: seconds,
      }),
    );
  if (has(cpu))
    found.push(
      runChart({
        ...own,
        title: "CPUs kept busy",
        note: "",
        lines: [{ name: "cores", series: cpu, colour: "s-cpu" }],
        value: (cores) => `${cores.toFixed(1)} cores`,
        axis: (cores) => String(cores),
      }),
    );
  return found;
}

// ---- lists -------------------------------------------------------------------------------------

function gapsOf(gpu: Gpu | undefined): HTMLElement[] {
  const gaps = [...(gpu?.busy?.gaps ?? [])];
  if (!gpu || !gaps.length) return [];
  const longest = gaps.sort((a, b) => b.ended_s - b.began_s - (a.ended_s - a.began_s)).slice(0, 8);
  const rows = longest.map(({ began_s, ended_s, phase }): [string, string] => [
    `at ${duration(began_s)}`,
    `for ${duration(ended_s - began_s)}${phase ? `, in ${phase}` : ""}`,
  ]);
  const left = (gpu.busy?.num_gaps ?? 0) - longest.length;
  return [
    section(
      `Longest pauses of GPU ${gpu.index}`,
      pairs(rows),
      ...(left ? [h("p", { class: "note" }, `and ${left} shorter ones`)] : []),
    ),
  ];
}

function foldsOf({ report, words, steps }: ReportPage): (HTMLElement | null)[] {
  const events = report.marks.map(({ at_s, kind, text }): [string, string] => [
    duration(at_s),
    text ? `${kind}: ${text}` : kind,
  ]);
  const left = report.num_marks - report.marks.length;
  if (left > 0) events.push(["later", `${left} more events`]);
  const phases = report.phases.map(({ name, began_s, ended_s, rank }): [string, string] => [
    `at ${duration(began_s)}`,
    `${name}, for ${duration(ended_s - began_s)}${rank === null ? "" : `, rank ${rank}`}`,
  ]);
  const shorter = report.num_phases - report.phases.length;
  if (shorter > 0) phases.push(["besides", `${shorter} shorter ones`]);
  const ranks = words.steps.map((text, place): [string, string] => [
    `rank ${steps[place]?.rank ?? "?"}`,
    text,
  ]);
  return [
    events.length ? fold(`Events (${report.num_marks})`, pairs(events)) : null,
    phases.length ? fold(`Phases (${report.num_phases})`, pairs(phases)) : null,
    ranks.length > 1 ? fold("Steps of each rank", pairs(ranks)) : null,
    words.host ? fold("The host", h("p", {}, words.host)) : null,
  ];
}
