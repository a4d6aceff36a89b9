// Points of a series, and colours. Pure: no document is needed.

import type { Series } from "./report_data";

/** The mean of the point nearest to a time; null where nothing was seen. */
export function nearest(series: Series, at: number): number | null {
  const { times, mean } = series;
  if (!times.length) return null;
  let [low, high] = [0, times.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (times[middle]! <= at) low = middle;
    else high = middle;
  }
  const place = at - times[low]! <= times[high]! - at ? low : high;
  return mean[place] ?? null;
}

/** A colour of the style sheet, thinner: "#1d5fd1" at 0.2 is "rgb(29 95 209 / 0.2)". */
export function faint(hex: string, alpha: number): string {
  const found = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(hex);
  if (!found) return hex;
  return `rgb(${found.slice(1).map((part) => parseInt(part, 16)).join(" ")} / ${alpha})`;
}
