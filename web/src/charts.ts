// Series over the time of a run: charts that share their cursor and their zoom.

import uPlot from "uplot";
import { colours, h } from "./dom";
import { faint, nearest } from "./points";
import type { Gap, Halt, Mark, Phase, Series } from "./report_data";
import { STEPS, clock } from "./report_words";
import {
  FONT,
  type Rule,
  drawGaps,
  drawHalts,
  drawMarks,
  drawPhases,
  drawRules,
} from "./run_overlays";

export interface Line {
  name: string;
  series: Series;
  colour: string; // a name of the style sheet
  filled?: boolean;
}

export interface ChartOptions {
  title: string;
  note: string;
  lines: Line[];
  value: (value: number) => string; // at the cursor
  axis: (value: number) => string;
  highest: number | null; // of the axis; null: by the values
  rules: Rule[];
  gaps: Gap[];
  halts: Halt[];
  phases: Phase[];
  marks: Mark[];
  lasted: number;
  isOverlaid?: boolean; // lines of several runs: without their bands, which would hide each other
}

export interface RunChart {
  element: HTMLElement;
  redraw(): void;
}

const SYNC = "run";
const NARROW = 520;

/** A titled chart; what is at the cursor stands beside its title. */
export function runChart(options: ChartOptions): RunChart {
  const reading = h("p", { class: "at", "aria-hidden": "true" });
  const frame = h("div", {
    class: "plot",
    role: "img",
    "aria-label": `${options.title} over the run. ${options.note}`,
  });
  const element = h(
    "figure",
    { class: "run-chart" },
    h("figcaption", {}, h("h3", {}, options.title), reading),
    frame,
    options.note ? h("p", { class: "note" }, options.note) : null,
  );
  let plot: uPlot | null = null;
  const redraw = (): void => {
    const zoom = plot && scaleOf(plot);
    plot?.destroy();
    frame.replaceChildren();
    plot = draw(frame, reading, options);
    if (zoom) plot.setScale("x", zoom);
  };
  new ResizeObserver(() => {
    if (frame.clientWidth && plot?.width !== frame.clientWidth) redraw();
  }).observe(frame);
  return { element, redraw };
}

function scaleOf(plot: uPlot): { min: number; max: number } | null {
  const { min, max } = plot.scales["x"] ?? {};
  return min == null || max == null ? null : { min, max };
}

function draw(frame: HTMLElement, reading: HTMLElement, options: ChartOptions): uPlot {
  const width = Math.max(frame.clientWidth, 200);
  const tell = (u: uPlot): void => {
    reading.replaceChildren(...readingOf(u.cursor.idx ?? null, u.data[0], options));
  };
  const plot = new uPlot(
    {
      width,
      height: (width < NARROW ? 150 : 170) + (options.phases.length ? 22 : 0),
      legend: { show: false },
      padding: [options.phases.length ? 30 : 10, 26, 0, 0],
      cursor: {
        y: false,
        points: { size: 7, width: 1.5, fill: colours()("surface") },
        drag: { x: true, y: false, setScale: true },
        sync: { key: SYNC, scales: ["x", null] },
      },
      scales: {
        x: { time: false, range: (u, min, max) => extent(u.data[0], min, max, options.lasted) },
        y: { range: (_, __, max) => [0, options.highest ?? ((max || 1) * 1.1)] },
      },
      axes: axes(width, options),
      series: [{}, ...options.lines.flatMap(linesOf)],
      bands: (options.isOverlaid ? [] : options.lines).map((line, i) => ({
        series: [3 * i + 3, 3 * i + 1] as uPlot.Band.Bounds,
        fill: faint(colours()(line.colour), 0.22),
      })),
      hooks: {
        drawAxes: [
          (u) => drawGaps(u, options.gaps),
          (u) => drawHalts(u, options.halts),
          (u) => drawPhases(u, options.phases),
        ],
        draw: [(u) => drawMarks(u, options.marks), (u) => drawRules(u, options.rules)],
        setCursor: [tell],
      },
    },
    aligned(options),
    frame,
  );
  plot.ctx.canvas.setAttribute("aria-hidden", "true");
  tell(plot);
  return plot;
}

/** What is zoomed to; where that is all the data, the whole run. */
function extent(
  times: ArrayLike<number>,
  min: number | null,
  max: number | null,
  lasted: number,
): [number, number] {
  const isWhole = min === times[0] && max === times[times.length - 1];
  if (min === null || max === null || isWhole) return [0, Math.max(lasted, max ?? 0, 1e-3)];
  return [Math.max(min, 0), Math.max(max, min + 1e-3)];
}

/** All lines over one axis of time: their spans need not be the same. */
function aligned({ lines }: ChartOptions): uPlot.AlignedData {
  const tables = lines.map(
    ({ series }) => [series.times, series.low, series.mean, series.high] as uPlot.AlignedData,
  );
  if (!tables.length) return [[]];
  return tables.length === 1 ? tables[0]! : uPlot.join(tables);
}

/** The lowest and the highest as the ends of a band, the mean as a line. */
function linesOf(line: Line): uPlot.Series[] {
  const colour = colours()(line.colour);
  const hidden: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false } };
  return [
    hidden,
    {
      label: line.name,
      stroke: colour,
      width: 1.75,
      fill: line.filled ? faint(colour, 0.18) : undefined,
      // A single span is a point: without it there would be nothing to see.
      points: { show: line.series.times.length < 3, size: 6 },
      spanGaps: false,
    },
    hidden,
  ];
}

function axes(width: number, options: ChartOptions): uPlot.Axis[] {
  const colour = colours();
  const shared = {
    stroke: colour("muted"),
    font: `12px ${FONT}`,
    ticks: { show: false },
    grid: { stroke: colour("line"), width: 1 },
  };
  return [
    {
      ...shared,
      size: 26,
      space: 72,
      incrs: STEPS,
      values: (_, splits) => splits.map(clock),
    },
    {
      ...shared,
      size: width < NARROW ? 54 : 58,
      space: 34,
      values: (_, splits) => splits.map(options.axis),
    },
  ];
}

function readingOf(
  index: number | null,
  times: ArrayLike<number>,
  { lines, value }: ChartOptions,
): (HTMLElement | string)[] {
  const at = index === null ? undefined : times[index];
  if (at === undefined) return [];
  const parts = lines.flatMap(({ name, series, colour }) => {
    const found = nearest(series, at);
    if (found === null) return [];
    const word = h("span", { class: "key-word" }, lines.length > 1 ? `${name} ` : "", value(found));
    word.style.setProperty("--key", `var(--${colour})`);
    return [word];
  });
  return [h("b", {}, clock(at)), ...parts];
}
