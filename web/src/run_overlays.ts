// What is drawn on a chart of a run beside its lines: gaps, halts, phases, events, limits.

import type uPlot from "uplot";
import { colours } from "./dom";
import { drawRule } from "./overlays";
import type { Gap, Halt, Mark, Phase } from "./report_data";

export const FONT = "system-ui, sans-serif";

/** A level that is drawn across: the GPU's memory, the peak, the power limit. */
export interface Rule {
  value: number;
  text: string;
  colour: string; // a name of the style sheet
  dashed?: boolean;
}

const ratio = (u: uPlot): number => u.ctx.canvas.width / u.width;

/** Draws only inside the chart's frame. */
function within(u: uPlot, above: number, draw: (px: number) => void): void {
  const { ctx, bbox } = u;
  const px = ratio(u);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - above * px, bbox.width, bbox.height + above * px);
  ctx.clip();
  draw(px);
  ctx.restore();
}

/** Where the GPU stood still. */
export function drawGaps(u: uPlot, gaps: Gap[]): void {
  within(u, 0, (px) => {
    u.ctx.fillStyle = colours()("gap");
    for (const { began_s, ended_s } of gaps) {
      const left = u.valToPos(began_s, "x", true);
      const wide = Math.max(u.valToPos(ended_s, "x", true) - left, px);
      u.ctx.fillRect(left, u.bbox.top, wide, u.bbox.height);
    }
  });
}

/** Where the command was halted: hatched, with the word where there is room. */
export function drawHalts(u: uPlot, halts: Halt[]): void {
  const { ctx, bbox } = u;
  for (const { began_s, ended_s } of halts) {
    within(u, 0, (px) => {
      const left = Math.max(u.valToPos(began_s, "x", true), bbox.left);
      const right = Math.min(u.valToPos(ended_s, "x", true), bbox.left + bbox.width);
      const wide = Math.max(right - left, px);
      if (right < bbox.left || left > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.rect(left, bbox.top, wide, bbox.height);
      ctx.clip();
      ctx.strokeStyle = colours()("line");
      ctx.lineWidth = 1.5 * px;
      ctx.beginPath();
      for (let x = left - bbox.height; x < left + wide; x += 8 * px) {
        ctx.moveTo(x, bbox.top + bbox.height);
        ctx.lineTo(x + bbox.height, bbox.top);
      }
      ctx.stroke();
      ctx.font = `${12 * px}px ${FONT}`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "center";
      ctx.fillStyle = colours()("muted");
      if (ctx.measureText("halted").width + 8 * px < wide)
        ctx.fillText("halted", left + wide / 2, bbox.top + 12 * px);
    });
  }
}

/** Each phase as a stretch above the chart, with its name where there is room. */
export function drawPhases(u: uPlot, phases: Phase[]): void {
  const names = [...new Set(phases.map(({ name }) => name))];
  within(u, 26, (px) => {
    const { ctx, bbox } = u;
    ctx.font = `${12 * px}px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "center";
    for (const { name, began_s, ended_s } of phases) {
      const left = Math.max(u.valToPos(began_s, "x", true), bbox.left);
      const right = Math.min(u.valToPos(ended_s, "x", true), bbox.left + bbox.width);
      if (right <= left) continue;
      ctx.fillStyle = colours()(`phase-${"abc"[names.indexOf(name) % 3]}`);
      ctx.fillRect(left, bbox.top - 24 * px, Math.max(right - left - px, px), 20 * px);
      ctx.fillStyle = colours()("ink");
      if (ctx.measureText(name).width + 8 * px < right - left)
        ctx.fillText(name, (left + right) / 2, bbox.top - 14 * px);
    }
  });
}

/** Events as upright lines with a head. */
export function drawMarks(u: uPlot, marks: Mark[]): void {
  within(u, 0, (px) => {
    const { ctx, bbox } = u;
    for (const { at_s, kind } of marks) {
      const x = Math.round(u.valToPos(at_s, "x", true));
      ctx.fillStyle = colours()(kind === "out-of-memory" || kind === "lost" ? "limit" : "warn");
      ctx.fillRect(x - 0.5 * px, bbox.top, px, bbox.height);
      ctx.beginPath();
      ctx.moveTo(x - 4.5 * px, bbox.top);
      ctx.lineTo(x + 4.5 * px, bbox.top);
      ctx.lineTo(x, bbox.top + 7 * px);
      ctx.fill();
    }
  });
}

/** Levels, with their names at the right end; of two that are near each other, one stands below. */
export function drawRules(u: uPlot, rules: Rule[]): void {
  const heights = rules.map(({ value }) => u.valToPos(value, "y", true));
  rules.forEach((rule, place) => {
    const px = ratio(u);
    const y = heights[place]!;
    const isNear = heights.some(
      (other, i) => i !== place && y - other >= 0 && y - other < 22 * px && (y !== other || i < place),
    );
    drawRule(u, Math.round(y), {
      colour: colours()(rule.colour),
      dash: rule.dashed ? [5, 4] : [],
      width: 1.5,
      text: rule.text,
      below: isNear || y - u.bbox.top < 18 * px,
    });
  });
}
