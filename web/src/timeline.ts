// The memory of one training step, drawn: layers on top of each other, below the GPU's limit.

import uPlot from "uplot";
import type { Plan, Timeline } from "./data";
import { colourOf, colours, h, styled } from "./dom";
import { layersAtPeak, peakBar } from "./peak_chart";
import {
  FONT,
  columnsFor,
  drawLimits,
  drawNames,
  drawOther,
  drawPeak,
  drawPhases,
} from "./overlays";
import { type Layer, contextBytes, inColumns, layersOf, peakOf, phaseAt } from "./stack";
import { bytes, gib, plainOp, toGib } from "./words";

export interface Chart {
  element: HTMLElement;
  show(plan: Plan): void;
  redraw(): void; // in the colours and the width of now
}

const SLIDER: Record<string, string | null> = {
  role: "slider",
  tabindex: "0",
  "aria-label": "Memory over one training step: arrow keys move through it",
  "aria-orientation": "horizontal",
};
const PICTURE: Record<string, string | null> = {
  ...Object.fromEntries(Object.keys(SLIDER).map((name) => [name, null])),
  ...Object.fromEntries(["min", "max", "now", "text"].map((name) => [`aria-value${name}`, null])),
  role: "img",
  "aria-label": "Memory at the peak of one training step",
};

type Drawable = Plan & { timeline: Timeline };

const hasTimeline = (plan: Plan): plan is Drawable => (plan.timeline?.positions.length ?? 0) > 1;

/** A chart whose heights are to the same scale for every plan. */
export function timelineChart(plans: Plan[], capacity: number): Chart {
  const highest = Math.max(capacity, ...plans.map((plan) => plan.prediction.high_bytes));
  const frame = h("div", { class: "chart" });
  const reading = h("div", { class: "reading" });
  const note = h("p", { class: "note" });
  const element = h("div", {}, h("div", { class: "timeline" }, frame, reading), note);
  let drawn: Drawn | null = null;
  let shown: Plan | null = null;

  // What any other plan is held against: the recommended one.
  const otherThan = (plan: Plan): Plan | null =>
    plans.find((other) => other.recommended && other !== plan && other.timeline) ?? null;

  const draw = (): void => {
    drawn?.plot.destroy();
    drawn = null;
    frame.replaceChildren();
    if (!shown) return;
    const isWhole = hasTimeline(shown);
    frame.classList.toggle("is-peak-alone", !isWhole);
    for (const [name, value] of Object.entries(isWhole ? SLIDER : PICTURE)) {
      if (value === null) frame.removeAttribute(name);
      else frame.setAttribute(name, value);
    }
    note.textContent = noteOn(shown, otherThan(shown), plans);
    if (!hasTimeline(shown)) {
      frame.append(peakBar(shown, capacity, highest * 1.09));
      const { phase, op, module } = shown.prediction.peak_at;
      const where = `${plainOp(op)}${module ? ` in ${module}` : ""}`;
      const layers = layersAtPeak(shown);
      const all = layers.reduce((sum, layer) => sum + (layer.bytes[0] ?? 0), 0);
      reading.replaceChildren(...readingOf(shown, layers, 0, true, phase, where, all));
      return;
    }
    drawn = drawInto(
      frame,
      reading,
      shown,
      shown.timeline,
      otherThan(shown),
      plans.findIndex((one) => one.recommended) + 1,
      toGib(capacity),
      toGib(highest),
    );
  };
  frame.addEventListener("keydown", (event) => drawn?.onKey(event));
  new ResizeObserver(() => {
    if (drawn && frame.clientWidth && drawn.plot.width !== frame.clientWidth) draw();
  }).observe(frame);
  return {
    element,
    show(plan) {
      shown = plan;
      draw();
    },
    redraw: draw,
  };
}

interface Drawn {
  plot: uPlot;
  onKey(event: KeyboardEvent): void;
}

function drawInto(
  frame: HTMLElement,
  reading: HTMLElement,
  plan: Plan,
  whole: Timeline,
  other: Plan | null,
  recommended: number,
  limit: number,
  highest: number,
): Drawn {
  const width = Math.max(frame.clientWidth, 200);
  const timeline = inColumns(whole, columnsFor(width));
  const layers = layersOf(timeline, contextBytes(plan));
  const peak = peakOf(layers);
  const last = timeline.positions.length - 1;
  let at: number | null = null;

  const tell = (index: number | null): void => {
    at = index;
    const place = index ?? peak;
    const phase = phaseAt(timeline.phases, timeline.moments[place] ?? 0);
    const op = plainOp(timeline.op_names[timeline.ops[place] ?? -1] ?? "");
    const all = layers.reduce((sum, layer) => sum + (layer.bytes[place] ?? 0), 0);
    reading.replaceChildren(
      ...readingOf(plan, layers, place, index === null, phase, op, all),
      ...(other ? [keyOf(other, recommended)] : []),
    );
    frame.setAttribute("aria-valuemin", "0");
    frame.setAttribute("aria-valuemax", String(last));
    frame.setAttribute("aria-valuenow", String(place));
    frame.setAttribute("aria-valuetext", `${phase}${op ? `, ${op}` : ""}: ${bytes(all)} in all`);
  };
  const plot = new uPlot(
    {
      width,
      height: width < 520 ? 280 : 380,
      legend: { show: false },
      padding: [30, 8, 0, 0],
      scales: { x: { time: false, range: [0, 1] }, y: { range: [0, highest * 1.09] } },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      axes: axes(width),
      series: [{}, ...layers.map(seriesOf)],
      bands: layers.slice(1).map((layer, i) => ({
        series: [i + 2, i + 1] as uPlot.Band.Bounds,
        fill: colours()(colourOf(layer.name)) || colours()("c-other"),
      })),
      hooks: {
        drawAxes: [(u) => drawPhases(u, timeline)],
        draw: [
          (u) => drawNames(u, layers, timeline),
          (u) => drawOther(u, other),
          (u) => drawPeak(u, layers, timeline),
          (u) => drawLimits(u, limit, toGib(plan.prediction.device_bytes)),
        ],
        setCursor: [(u) => tell(u.cursor.idx ?? null)],
      },
    },
    [timeline.positions, ...layers.map((layer) => layer.tops)] as uPlot.AlignedData,
    frame,
  );
  const canvas = plot.ctx.canvas;
  canvas.setAttribute("aria-hidden", "true"); // the slider around it tells the same
  tell(null);

  const onKey = (event: KeyboardEvent): void => {
    const far = Math.max(Math.round(last / 20), 1);
    const here = at ?? peak;
    const moves: Record<string, number> = {
      ArrowLeft: here - 1,
      ArrowDown: here - 1,
      ArrowRight: here + 1,
      ArrowUp: here + 1,
      PageDown: here - far,
      PageUp: here + far,
      Home: 0,
      End: last,
    };
    const wanted = event.key === "Escape" ? peak : moves[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    const index = Math.min(Math.max(wanted, 0), last);
    plot.setCursor({ left: plot.valToPos(timeline.positions[index] ?? 0, "x"), top: 1 }, false);
    tell(index); // two positions may share a pixel: the index decides
  };
  return { plot, onKey };
}

/** What the outline over the layers is. */
const keyOf = (other: Plan, number: number): HTMLElement =>
  h(
    "p",
    { class: "outline" },
    h("i", { "aria-hidden": "true" }),
    `plan ${number}, the recommended one: ${bytes(other.prediction.device_bytes)}`,
  );

function seriesOf(layer: Layer, place: number): uPlot.Series {
  const colour = colours();
  const fill = colour(colourOf(layer.name)) || colour("c-other");
  return {
    label: layer.name,
    stroke: colour("edge"), // layers are told apart without their colours, too
    width: 1,
    fill: place === 0 ? fill : undefined,
    paths: uPlot.paths.stepped?.({ align: 1 }),
    points: { show: false },
  };
}

function axes(width: number): uPlot.Axis[] {
  const colour = colours();
  return [
    { show: true, size: 8, values: () => [], grid: { show: false }, ticks: { show: false } },
    {
      size: width < 520 ? 34 : 58,
      stroke: colour("muted"),
      font: `12px ${FONT}`,
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      space: 44,
      values: (_, splits) => splits.map((value) => String(value)),
      ...(width < 520 ? {} : { label: "GiB on the GPU", labelFont: `12px ${FONT}`, labelSize: 18 }),
    },
  ];
}

/** What is where the cursor is, or at the peak: a list, the top layer first. */
function readingOf(
  plan: Plan,
  layers: Layer[],
  place: number,
  isPeak: boolean,
  phase: string,
  op: string,
  all: number,
): HTMLElement[] {
  const rows = [...layers]
    .reverse()
    .map((layer) =>
      h(
        "tr",
        {},
        h(
          "th",
          { scope: "row" },
          styled(h("i", { class: "swatch" }), {
            background: `var(--${colourOf(layer.name)}, var(--c-other))`,
          }),
          layer.name,
        ),
        h("td", {}, gib(layer.bytes[place] ?? 0)),
      ),
    );
  return [
    h(
      "p",
      { class: "where" },
      h("b", {}, isPeak ? `At the peak: ${phase}` : phase),
      h("span", { class: "op" }, op || "before the first allocation"),
    ),
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, "Memory by category"),
      h(
        "thead",
        { class: "unseen" },
        h("tr", {}, h("th", { scope: "col" }, "Category"), h("th", { scope: "col" }, "GiB")),
      ),
      h("tbody", {}, ...rows),
      h(
        "tfoot",
        {},
        h("tr", { class: "sum" }, h("th", { scope: "row" }, "in all, GiB"), h("td", {}, gib(all))),
        h(
          "tr",
          {},
          h("th", { scope: "row" }, "torch's cache, at most"),
          h("td", {}, gib(cacheBytes(plan))),
        ),
        h(
          "tr",
          {},
          h("th", { scope: "row" }, "nvidia-smi, at most"),
          h("td", {}, gib(plan.prediction.device_bytes)),
        ),
      ),
    ),
  ];
}

/** What the allocator holds beside the tensors at their peak. */
const cacheBytes = ({ prediction }: Plan): number =>
  Math.max(prediction.reserved_bytes - prediction.allocated_bytes, 0);

function noteOn(plan: Plan, other: Plan | null, plans: Plan[]): string {
  const cache = cacheBytes(plan);
  const isWhole = hasTimeline(plan);
  const parts = [
    isWhole
      ? "From left to right in the order of the step's allocations, which is not to the scale of time; each column is the highest of its moments."
      : "The peak alone: this file has no timeline of the step. oomph plan --html FILE writes one that has.",
  ];
  if (plan.variant.accumulation > 2 && isWhole) {
    parts.push(
      `The step has ${plan.variant.accumulation} micro-batches; the first two are drawn, as every further one is like the second.`,
    );
  }
  if (cache > 0) {
    parts.push(
      `Torch's allocator reserves ${bytes(cache)} more than the tensors of the peak: its cache and its gaps. With them nvidia-smi shows the ${isWhole ? "dashed line" : "hatched part, too"}.`,
    );
  }
  if (other && isWhole)
    parts.push(`The grey outline is plan ${plans.indexOf(other) + 1}, the recommended one.`);
  return parts.join(" ");
}
