// Which plans are beaten by none, and the marks of an axis. Pure.

export interface Point {
  x: number;
  y: number;
}

/** The numbers of the points that no other beats on both axes, by x. */
export function front(points: Point[]): number[] {
  const order = points
    .map((_, i) => i)
    .sort((a, b) => points[a]!.x - points[b]!.x || points[a]!.y - points[b]!.y);
  const kept: number[] = [];
  let lowest = Infinity;
  for (const i of order) {
    if (points[i]!.y < lowest) {
      kept.push(i);
      lowest = points[i]!.y;
    }
  }
  return kept;
}

/** About `count` round numbers between two ends. */
export function ticks(low: number, high: number, count: number): number[] {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((n) => n * power >= rough * (1 - 1e-9)) ?? 10);
  const found: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** The ends of an axis: the values and some air, never below zero. */
export function span(values: number[], air = 0.08): [number, number] {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const pad = (high - low || Math.abs(high) || 1) * air;
  return [Math.max(low - pad, 0), high + pad];
}
