// The memory of one training step, drawn: layers on top of each other, below the GPU's limit.

import uPlot from "uplot";
import type { Plan, Timeline } from "./data";
import { colourOf, colours, h, styled } from "./dom";
import { type Layer, contextBytes, layersOf, peakOf, phaseAt, segmentsOf, spotFor } from "./stack";
import { bytes, gib, toGib } from "./words";

const FONT = "system-ui, sans-serif";

export interface Chart {
  element: HTMLElement;
  show(plan: Plan): void;
  redraw(): void; // in the colours and the width of now
}

/** A chart whose heights are to the same scale for every plan. */
export function timelineChart(plans: Plan[], capacity: number): Chart {
  const highest = Math.max(capacity, ...plans.map((plan) => plan.prediction.high_bytes));
  const frame = h("div", {
    class: "chart",
    role: "slider",
    tabindex: 0,
    "aria-label": "Memory over one training step: arrow keys move through it",
    "aria-orientation": "horizontal",
  });
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
    note.textContent = noteOn(shown, otherThan(shown), plans);
    if (!shown.timeline || shown.timeline.positions.length < 2) {
      frame.append(h("p", { class: "note" }, "No timeline was recorded for this plan."));
      reading.replaceChildren();
      return;
    }
    drawn = drawInto(frame, reading, shown, shown.timeline, otherThan(shown), toGib(capacity), toGib(highest));
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
  timeline: Timeline,
  other: Plan | null,
  limit: number,
  highest: number,
): Drawn {
  const layers = layersOf(timeline, contextBytes(plan));
  const peak = peakOf(layers);
  const last = timeline.positions.length - 1;
  let at: number | null = null;

  const tell = (index: number | null): void => {
    at = index;
    const place = index ?? peak;
    const phase = phaseAt(timeline.phases, timeline.positions[place] ?? 0);
    const op = timeline.op_names[timeline.ops[place] ?? -1] ?? "";
    const all = layers.reduce((sum, layer) => sum + (layer.bytes[place] ?? 0), 0);
    reading.replaceChildren(...readingOf(plan, layers, place, index === null, phase, op, all));
    frame.setAttribute("aria-valuemin", "0");
    frame.setAttribute("aria-valuemax", String(last));
    frame.setAttribute("aria-valuenow", String(place));
    frame.setAttribute("aria-valuetext", `${phase}${op ? `, ${op}` : ""}: ${bytes(all)} in all`);
  };
  const width = Math.max(frame.clientWidth, 200);
  const plot = new uPlot(
    {
      width,
      height: width < 520 ? 280 : 380,
      legend: { show: false },
      padding: [30, 8, 0, 0],
      scales: { x: { time: false, range: [0, 1] }, y: { range: [0, highest * 1.04] } },
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

function seriesOf(layer: Layer, place: number): uPlot.Series {
  const colour = colours();
  const fill = colour(colourOf(layer.name)) || colour("c-other");
  return {
    label: layer.name,
    stroke: colour("surface"), // a thin gap: layers are told apart without their colours, too
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

const SHORT: Record<string, string> = { forward: "fwd", backward: "bwd" };

const ratio = (u: uPlot): number => u.ctx.canvas.width / u.width;

/** Each phase as a stretch above the chart, with its name where there is room for it. */
function drawPhases(u: uPlot, timeline: Timeline): void {
  const { ctx } = u;
  const colour = colours();
  const px = ratio(u);
  const high = 20 * px;
  ctx.save();
  ctx.font = `${12 * px}px ${FONT}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "center";
  segmentsOf(timeline.phases).forEach(({ from, to, name }) => {
    const left = u.valToPos(from, "x", true);
    const right = u.valToPos(to, "x", true);
    ctx.fillStyle = colour(name === "backward" ? "phase-b" : name === "forward" ? "phase-a" : "phase-c");
    ctx.fillRect(left, u.bbox.top - high - 4 * px, Math.max(right - left - px, px), high);
    ctx.fillStyle = colour("line");
    ctx.fillRect(left, u.bbox.top, px, u.bbox.height);
    ctx.fillStyle = colour("ink");
    const told = [name, SHORT[name] ?? name].find((text) => ctx.measureText(text).width + 6 * px < right - left);
    if (told) ctx.fillText(told, (left + right) / 2, u.bbox.top - high / 2 - 4 * px);
  });
  ctx.restore();
}

/** The name of each layer that is thick enough, where there is most room for it. */
function drawNames(u: uPlot, layers: Layer[], timeline: Timeline): void {
  const { ctx, bbox } = u;
  const px = ratio(u);
  ctx.save();
  ctx.font = `500 ${12 * px}px ${FONT}`;
  ctx.fillStyle = colours()("on-fill");
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const floor = timeline.positions.map(() => 0);
  layers.forEach((layer, i) => {
    const width = (ctx.measureText(layer.name).width + 20 * px) / bbox.width;
    const spot = spotFor(layers[i - 1]?.tops ?? floor, layer.tops, timeline.positions, width);
    const high = u.valToPos(0, "y", true) - u.valToPos(spot.room, "y", true);
    if (high >= 15 * px) ctx.fillText(layer.name, u.valToPos(spot.x, "x", true), u.valToPos(spot.y, "y", true));
  });
  ctx.restore();
}

/** The height of another plan as a line, to the same scale. */
function drawOther(u: uPlot, other: Plan | null): void {
  if (!other?.timeline) return;
  const { ctx } = u;
  const tops = layersOf(other.timeline, contextBytes(other)).pop()?.tops ?? [];
  ctx.save();
  ctx.strokeStyle = colours()("ink");
  ctx.globalAlpha = 0.55;
  ctx.lineWidth = 1.25 * ratio(u);
  ctx.beginPath();
  other.timeline.positions.forEach((position, i) => ctx.lineTo(u.valToPos(position, "x", true), u.valToPos(tops[i] ?? 0, "y", true)));
  ctx.stroke();
  ctx.restore();
}

/** A ring at the most that tensors and context come to. */
function drawPeak(u: uPlot, layers: Layer[], timeline: Timeline): void {
  const { ctx } = u;
  const px = ratio(u);
  const at = peakOf(layers);
  const top = layers[layers.length - 1]?.tops[at] ?? 0;
  ctx.save();
  ctx.beginPath();
  ctx.arc(u.valToPos(timeline.positions[at] ?? 0, "x", true), u.valToPos(top, "y", true), 4 * px, 0, 2 * Math.PI);
  ctx.fillStyle = colours()("surface");
  ctx.fill();
  ctx.strokeStyle = colours()("ink");
  ctx.lineWidth = 1.75 * px;
  ctx.stroke();
  ctx.restore();
}

/** The GPU's end, and what nvidia-smi would show at the most. */
function drawLimits(u: uPlot, limit: number, device: number): void {
  const colour = colours();
  rule(u, device, colour("ink"), [5, 4], 1.25, `nvidia-smi at most ${device.toFixed(1)} GiB`, device > limit * 0.94);
  rule(u, limit, colour("limit"), [], 2, `limit ${limit.toFixed(1)} GiB`, device <= limit * 0.94 && device > limit);
}

function rule(u: uPlot, value: number, colour: string, dash: number[], width: number, text: string, below: boolean): void {
  const { ctx, bbox } = u;
  const px = ratio(u);
  const y = Math.round(u.valToPos(value, "y", true));
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = width * px;
  ctx.setLineDash(dash.map((length) => length * px));
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `600 ${12 * px}px ${FONT}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const [right, middle] = [bbox.left + bbox.width - 6 * px, y + (below ? 11 : -10) * px];
  const wide = ctx.measureText(text).width;
  ctx.globalAlpha = 0.85;
  ctx.fillStyle = colours()("surface");
  ctx.fillRect(right - wide - 4 * px, middle - 8 * px, wide + 8 * px, 16 * px);
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour;
  ctx.fillText(text, right, middle);
  ctx.restore();
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
  const rows = [...layers].reverse().map((layer) =>
    h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        styled(h("i", { class: "swatch" }), { background: `var(--${colourOf(layer.name)}, var(--c-other))` }),
        layer.name,
      ),
      h("td", {}, gib(layer.bytes[place] ?? 0)),
    ),
  );
  return [
    h("p", { class: "where" }, h("b", {}, isPeak ? `At the peak: ${phase}` : phase), h("span", { class: "op" }, op || "before the first allocation")),
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, "Memory by category"),
      h("thead", { class: "unseen" }, h("tr", {}, h("th", { scope: "col" }, "Category"), h("th", { scope: "col" }, "GiB"))),
      h("tbody", {}, ...rows),
      h(
        "tfoot",
        {},
        h("tr", { class: "sum" }, h("th", { scope: "row" }, "in all, GiB"), h("td", {}, gib(all))),
        h("tr", {}, h("th", { scope: "row" }, "torch's cache, at most"), h("td", {}, gib(cacheBytes(plan)))),
        h("tr", {}, h("th", { scope: "row" }, "nvidia-smi, at most"), h("td", {}, gib(plan.prediction.device_bytes))),
      ),
    ),
  ];
}

/** What the allocator holds beside the tensors at their peak. */
const cacheBytes = ({ prediction }: Plan): number =>
  Math.max(prediction.reserved_bytes - prediction.allocated_bytes, 0);

function noteOn(plan: Plan, other: Plan | null, plans: Plan[]): string {
  const cache = cacheBytes(plan);
  const parts = ["From left to right in the order of the step's allocations, which is not to the scale of time."];
  if (plan.variant.accumulation > 2 && plan.timeline) {
    parts.push(
      `The step has ${plan.variant.accumulation} micro-batches; the first two are drawn, as every further one is like the second.`,
    );
  }
  if (cache > 0) {
    parts.push(
      `Torch's allocator reserves ${bytes(cache)} more than the tensors of the peak: its cache and its gaps. With them nvidia-smi shows the dashed line.`,
    );
  }
  if (other && plan.timeline) parts.push(`The thin line is plan ${plans.indexOf(other) + 1}, the recommended one.`);
  return parts.join(" ");
}
