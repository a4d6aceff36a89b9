// A timeline -> what is drawn of it. Pure.

import type { Plan, Timeline } from "./data";
import { toGib } from "./words";

export const CONTEXT = "CUDA context";

export interface Layer {
  name: string;
  bytes: number[]; // of its own, at each position
  tops: number[]; // GiB, with everything below it
}

/** What CUDA takes before the first tensor. */
export const contextBytes = (plan: Plan): number =>
  Math.max(plan.prediction.device_bytes - plan.prediction.reserved_bytes, 0);

/** The layers from the bottom up, each on top of the one before. */
export function layersOf(timeline: Timeline, context: number): Layer[] {
  const below = timeline.positions.map(() => 0);
  const named: [string, number[]][] = [
    [CONTEXT, timeline.positions.map(() => context)],
    ...timeline.categories.map((name, i): [string, number[]] => [
      name,
      timeline.live_bytes[i] ?? [],
    ]),
  ];
  return named.map(([name, own]) => {
    own.forEach((size, at) => (below[at] = (below[at] ?? 0) + size));
    return { name, bytes: own, tops: below.map(toGib) };
  });
}

export interface Columns extends Timeline {
  moments: number[]; // where in the step each column's moment is
}

/**
 * A timeline in so many columns of equal width, each the highest moment of its stretch: a peak of
 * one allocation is as wide as a column, and is seen.
 */
export function inColumns(timeline: Timeline, count: number): Columns {
  const { positions, live_bytes } = timeline;
  const total = (i: number): number => live_bytes.reduce((sum, layer) => sum + (layer[i] ?? 0), 0);
  const chosen: number[] = [];
  let next = 0;
  for (let column = 0; column < count; column++) {
    let best = Math.max(next - 1, 0); // what holds when the column begins
    for (
      ;
      next < positions.length && (positions[next]! < (column + 1) / count || column === count - 1);
      next++
    ) {
      if (total(next) > total(best)) best = next;
    }
    chosen.push(best);
  }
  chosen.push(chosen[count - 1] ?? 0); // the last column has an end, too
  const edges = chosen.map((_, column) => column / count);
  return {
    ...timeline,
    positions: edges,
    moments: chosen.map((i, column) => Math.max(positions[i] ?? 0, edges[column]!)),
    live_bytes: live_bytes.map((layer) => chosen.map((i) => layer[i] ?? 0)),
    ops: chosen.map((i) => timeline.ops[i] ?? -1),
  };
}

export interface Segment {
  from: number;
  to: number;
  name: string;
}

// Phases of a few events, told by their neighbours: too narrow to be marked.
const SILENT = new Set(["zero_grad", "input"]);

/** The phases as stretches of the step; those of a moment go to the one after. */
export function segmentsOf(phases: [number, string][]): Segment[] {
  const found: Segment[] = [];
  let from: number | null = null;
  phases.forEach(([start, name], i) => {
    const to = phases[i + 1]?.[0] ?? 1;
    from = from ?? start;
    if (SILENT.has(name) && i + 1 < phases.length) return;
    found.push({ from, to, name });
    from = null;
  });
  return found;
}

/** The phase that led to a position: what is there where a phase begins is the work of the one before. */
export function phaseAt(phases: [number, string][], position: number): string {
  let name = phases[0]?.[1] ?? "";
  for (const [start, phase] of phases) if (start < position) name = phase;
  return name;
}

export interface Spot {
  x: number; // the middle of the name, 0..1
  y: number; // GiB
  room: number; // GiB, from the layer's bottom to its top over the whole width of the name
}

/** The best place for a name of this width (a share of the step) inside a layer; the first of equals. */
export function spotFor(
  bottoms: number[],
  tops: number[],
  positions: number[],
  width: number,
): Spot {
  let best: Spot = { x: width / 2, y: 0, room: -Infinity };
  for (const position of positions) {
    const x = Math.min(Math.max(position, width / 2), 1 - width / 2);
    let [floor, ceiling] = [-Infinity, Infinity];
    for (
      let i = Math.max(last(positions, x - width / 2), 0);
      i < positions.length && positions[i]! <= x + width / 2;
      i++
    ) {
      floor = Math.max(floor, bottoms[i] ?? 0);
      ceiling = Math.min(ceiling, tops[i] ?? 0);
    }
    if (ceiling - floor > best.room) best = { x, y: (floor + ceiling) / 2, room: ceiling - floor };
  }
  return best;
}

/** The last place at or before a position: what holds there. */
function last(positions: number[], position: number): number {
  let [low, high] = [0, positions.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (positions[middle]! <= position) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The first place at which the whole stack is at its highest. */
export function peakOf(layers: Layer[]): number {
  const top = layers[layers.length - 1]?.tops ?? [];
  let best = 0;
  top.forEach((height, at) => {
    if (height > (top[best] ?? 0)) best = at;
  });
  return best;
}
