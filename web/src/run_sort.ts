// The order of runs. Pure.

import type { RunFigures, RunLine } from "./live_data";

const KEYS = ["started", "lasted", "peak", "active"] as const;
export type SortKey = (typeof KEYS)[number];

export const isSortKey = (text: string | null): text is SortKey =>
  KEYS.some((key) => key === text);

/** The runs by a figure, the largest first unless it goes up; what is not known is last. */
export function sorted(
  runs: RunLine[],
  figures: Record<string, RunFigures>,
  by: SortKey,
  isUp: boolean,
): RunLine[] {
  const valueOf = (run: RunLine): number | null => {
    if (by === "started") return run.started_at;
    if (by === "lasted") return run.duration_s;
    const known = figures[run.id];
    return (by === "peak" ? known?.peak_bytes : known?.busy_ratio) ?? null;
  };
  return [...runs].sort((a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return (isUp ? x - y : y - x) || b.started_at - a.started_at;
  });
}
