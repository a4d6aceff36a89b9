// The last quarter of an hour of one GPU: memory, kernel-active time and power as shares.

import uPlot from "uplot";
import { colours, h } from "./dom";
import { faint } from "./points";
import { percent } from "./report_words";
import { timeOfDay } from "./live_words";

export interface Lines {
  times: number[];
  memory: (number | null)[];
  busy: (number | null)[];
  power: (number | null)[];
}

export interface LiveChart {
  element: HTMLElement;
  show(lines: Lines): void;
  redraw(): void; // in the colours and the width of now
}

const NAMES: [keyof Lines, string, string][] = [
  ["memory", "memory", "s-memory"],
  ["busy", "kernel-active", "s-busy"],
  ["power", "power", "s-power"],
];
const FONT = "11px system-ui, sans-serif";
const HEIGHT = 118;
const LEAST_S = 120; // of the axis: the first seconds are not drawn as wide as a quarter of an hour

/** A chart that is given new lines each second. */
export function liveChart(label: string): LiveChart {
  const frame = h("div", { class: "live-plot", role: "img", "aria-label": label });
  const reading = h("p", { class: "live-key", "aria-hidden": "true" });
  const element = h("figure", { class: "live-chart" }, frame, reading);
  let plot: uPlot | null = null;
  let shown: Lines = { times: [], memory: [], busy: [], power: [] };
  const redraw = (): void => {
    plot?.destroy();
    frame.replaceChildren();
    plot = draw(frame, () => tell(reading, shown, plot?.cursor.idx ?? null), shown);
    tell(reading, shown, null);
  };
  new ResizeObserver(() => {
    if (frame.clientWidth && plot?.width !== frame.clientWidth) redraw();
  }).observe(frame);
  return {
    element,
    redraw,
    show(lines) {
      shown = lines;
      if (!plot) redraw();
      else plot.setData(table(lines));
      tell(reading, shown, plot?.cursor.idx ?? null);
    },
  };
}

const table = ({ times, memory, busy, power }: Lines): uPlot.AlignedData => [
  times,
  memory,
  busy,
  power,
];

function draw(frame: HTMLElement, onCursor: () => void, lines: Lines): uPlot {
  const colour = colours();
  const axis = {
    stroke: colour("muted"),
    font: FONT,
    ticks: { show: false },
    grid: { stroke: colour("line"), width: 1 },
  };
  const plot = new uPlot(
    {
      width: Math.max(frame.clientWidth, 160),
      height: HEIGHT,
      legend: { show: false },
      padding: [6, 6, 0, 0],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 6, width: 1.5, fill: colour("surface") },
        sync: { key: "live", scales: ["x", null] },
      },
      scales: {
        x: { time: false, range: (_, min, max) => extent(min, max) },
        y: { range: (_, __, most) => [0, 1.04 * Math.max(1, most ?? 1)] }, // power may pass its limit
      },
      axes: [
        {
          ...axis,
          size: 20,
          space: 60,
          incrs: [60, 120, 300],
          values: (_, splits) => splits.map((at) => timeOfDay(at).slice(0, 5)),
        },
        {
          ...axis,
          size: 42,
          splits: () => [0, 0.5, 1],
          values: (_, splits) => splits.map(percent),
        },
      ],
      series: [{}, ...NAMES.map(([name, label, key]) => lineOf(name, label, colour(key)))],
      hooks: { setCursor: [onCursor] },
    },
    table(lines),
    frame,
  );
  plot.ctx.canvas.setAttribute("aria-hidden", "true"); // the figures above it tell the same
  return plot;
}

const extent = (first: number | null, last: number | null): [number, number] => [
  Math.min(first ?? 0, (last ?? 0) - LEAST_S),
  last ?? 1,
];

const lineOf = (name: keyof Lines, label: string, stroke: string): uPlot.Series => ({
  label,
  stroke,
  width: name === "power" ? 1 : 1.75,
  fill: name === "memory" ? faint(stroke, 0.16) : undefined,
  points: { show: false },
  spanGaps: false,
});

/** The key of the chart; with the cursor in it, what is there. */
function tell(reading: HTMLElement, lines: Lines, index: number | null): void {
  const at = index === null ? undefined : lines.times[index];
  const words = NAMES.map(([name, label, key]) => {
    const value = index === null ? null : lines[name][index];
    const word = h("span", { class: "key-word" }, value == null ? label : `${label} ${percent(value)}`);
    word.style.setProperty("--key", `var(--${key})`);
    return word;
  });
  reading.replaceChildren(...words, ...(at === undefined ? [] : [h("b", {}, timeOfDay(at))]));
}
