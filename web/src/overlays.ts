// What is drawn on the chart beside its layers: phases, names, the peak, the limit, another plan.

import type uPlot from "uplot";
import type { Plan, Timeline } from "./data";
import { colours } from "./dom";
import {
  type Layer,
  contextBytes,
  inColumns,
  layersOf,
  peakOf,
  segmentsOf,
  spotFor,
} from "./stack";

export const FONT = "system-ui, sans-serif";
export const columnsFor = (width: number): number => Math.round(width / 2.5); // each wide enough to be seen

const SHORT: Record<string, string> = { forward: "fwd", backward: "bwd" };

const ratio = (u: uPlot): number => u.ctx.canvas.width / u.width;

/** Each phase as a stretch above the chart, with its name where there is room for it. */
export function drawPhases(u: uPlot, timeline: Timeline): void {
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
    ctx.fillStyle = colour(
      name === "backward" ? "phase-b" : name === "forward" ? "phase-a" : "phase-c",
    );
    ctx.fillRect(left, u.bbox.top - high - 4 * px, Math.max(right - left - px, px), high);
    ctx.fillStyle = colour("line");
    ctx.fillRect(left, u.bbox.top, px, u.bbox.height);
    ctx.fillStyle = colour("ink");
    const told = [name, SHORT[name] ?? name].find(
      (text) => ctx.measureText(text).width + 6 * px < right - left,
    );
    if (told) ctx.fillText(told, (left + right) / 2, u.bbox.top - high / 2 - 4 * px);
  });
  ctx.restore();
}

/** The name of each layer that is thick enough, where there is most room for it. */
export function drawNames(u: uPlot, layers: Layer[], timeline: Timeline): void {
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
    if (high >= 15 * px)
      ctx.fillText(layer.name, u.valToPos(spot.x, "x", true), u.valToPos(spot.y, "y", true));
  });
  ctx.restore();
}

/** The height of another plan as a line, to the same scale. */
export function drawOther(u: uPlot, other: Plan | null): void {
  if (!other?.timeline) return;
  const { ctx } = u;
  const timeline = inColumns(other.timeline, columnsFor(u.width));
  const tops = layersOf(timeline, contextBytes(other)).pop()?.tops ?? [];
  ctx.save();
  ctx.strokeStyle = colours()("ink");
  ctx.globalAlpha = 0.55;
  ctx.lineWidth = 1.25 * ratio(u);
  ctx.beginPath();
  timeline.positions.forEach((position, i) =>
    ctx.lineTo(u.valToPos(position, "x", true), u.valToPos(tops[i] ?? 0, "y", true)),
  );
  ctx.stroke();
  ctx.restore();
}

/** A ring at the most that tensors and context come to. */
export function drawPeak(u: uPlot, layers: Layer[], timeline: Timeline): void {
  const { ctx } = u;
  const px = ratio(u);
  const at = peakOf(layers);
  const top = layers[layers.length - 1]?.tops[at] ?? 0;
  ctx.save();
  ctx.beginPath();
  ctx.arc(
    u.valToPos(timeline.positions[at] ?? 0, "x", true),
    u.valToPos(top, "y", true),
    4 * px,
    0,
    2 * Math.PI,
  );
  ctx.fillStyle = colours()("surface");
  ctx.fill();
  ctx.strokeStyle = colours()("ink");
  ctx.lineWidth = 1.75 * px;
  ctx.stroke();
  ctx.restore();
}

/** The GPU's end, and what nvidia-smi would show at the most. */
export function drawLimits(u: uPlot, limit: number, device: number): void {
  const colour = colours();
  rule(
    u,
    device,
    colour("ink"),
    [5, 4],
    1.25,
    `nvidia-smi at most ${device.toFixed(1)} GiB`,
    device > limit * 0.94,
  );
  rule(
    u,
    limit,
    colour("limit"),
    [],
    2,
    `limit ${limit.toFixed(1)} GiB`,
    device <= limit * 0.94 && device > limit,
  );
}

function rule(
  u: uPlot,
  value: number,
  colour: string,
  dash: number[],
  width: number,
  text: string,
  below: boolean,
): void {
  drawRule(u, Math.round(u.valToPos(value, "y", true)), { colour, dash, width, text, below });
}

/** How a level looks; lengths are in CSS pixels. */
export interface RuleLook {
  colour: string;
  dash: number[];
  width: number;
  text: string;
  below: boolean;
}

/** A level across the chart, with its name at the right end. */
export function drawRule(u: uPlot, y: number, look: RuleLook): void {
  const { ctx, bbox } = u;
  const px = ratio(u);
  ctx.save();
  ctx.strokeStyle = look.colour;
  ctx.lineWidth = look.width * px;
  ctx.setLineDash(look.dash.map((length) => length * px));
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `600 ${12 * px}px ${FONT}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const [right, middle] = [bbox.left + bbox.width - 6 * px, y + (look.below ? 11 : -10) * px];
  const wide = ctx.measureText(look.text).width;
  ctx.globalAlpha = 0.85;
  ctx.fillStyle = colours()("surface");
  ctx.fillRect(right - wide - 4 * px, middle - 8 * px, wide + 8 * px, 16 * px);
  ctx.globalAlpha = 1;
  ctx.fillStyle = look.colour;
  ctx.fillText(look.text, right, middle);
  ctx.restore();
}
