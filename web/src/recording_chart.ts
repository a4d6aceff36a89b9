// Memory over the events of a recording: which of its points a view needs, and how they are drawn.

import { svg } from "./dom";
import type { View } from "./zoom";
import { bytes } from "./words";

/** The points of a recording: each is the fullest moment of the events that it stands for. */
export interface Recording {
  categories: string[];
  events: number[];
  live_bytes: number[][]; // by category
  reserved_bytes: number[];
  num_events: number;
}

const FILLS = ["activations", "parameters", "optimizer", "gradients", "temporaries", "inputs", "workspace", "cuda-context"];
export const fill = (category: number): string => `var(--c-${FILLS[category] ?? "other"})`;

/** Where an event is in the whole recording, 0..1. */
export const placeOf = (event: number, { num_events: num }: Recording): number => (event + 1) / (num + 1);

/** The first point whose event is after this one. */
function after(events: number[], event: number): number {
  let [low, high] = [0, events.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events[middle]! <= event) low = middle + 1;
    else high = middle;
  }
  return low;
}

export const totalsOf = ({ events, live_bytes: live }: Recording): number[] =>
  events.map((_, i) => live.reduce((sum, sizes) => sum + (sizes[i] ?? 0), 0));

/** The first and one past the last point of a view: the first is what holds where it begins. */
export function within(recording: Recording, { from, to }: View): [number, number] {
  const event = (place: number): number => place * (recording.num_events + 1) - 1;
  const first = Math.max(after(recording.events, event(from)) - 1, 0);
  return [first, Math.max(after(recording.events, event(to)), first + 1)];
}

/**
 * The points to draw a view with: all of them or, where there are several for a column, the fullest
 * and the emptiest of each column and the one with the most reserved. So no extreme is left out.
 */
export function chosen(recording: Recording, totals: number[], view: View, columns: number): number[] {
  const [first, last] = within(recording, view);
  const num = last - first;
  if (num <= columns) return Array.from({ length: num }, (_, i) => first + i);
  const found: number[] = [];
  for (let column = 0; column < columns; column++) {
    const begin = first + Math.floor((num * column) / columns);
    const end = first + Math.floor((num * (column + 1)) / columns);
    let [most, least, reserved] = [begin, begin, begin];
    for (let i = begin; i < end; i++) {
      if (totals[i]! > totals[most]!) most = i;
      if (totals[i]! < totals[least]!) least = i;
      if (recording.reserved_bytes[i]! > recording.reserved_bytes[reserved]!) reserved = i;
    }
    found.push(...new Set([begin, most, least, reserved].sort((a, b) => a - b)));
  }
  return found;
}

/** The areas of the categories and the line of what is reserved, as steps; `y` is of a size. */
export function paths(recording: Recording, points: number[], x: (event: number) => number, end: number, y: (size: number) => number): SVGPathElement[] {
  const { events, live_bytes: live, reserved_bytes: reserved, categories } = recording;
  const lefts = points.map((i) => x(events[i] ?? 0).toFixed(1));
  const rights = [...lefts.slice(1), Math.max(end, 0).toFixed(1)];
  const stepped = (sizes: number[]): string =>
    sizes.map((size, i) => `${i ? "V" : `M${lefts[0]} `}${y(size).toFixed(1)}H${rights[i]}`).join("");
  const below = points.map(() => 0);
  const areas = live.map((sizes, category) => {
    const bottoms = below.map((size) => y(size).toFixed(1));
    points.forEach((i, n) => { below[n] = (below[n] ?? 0) + (sizes[i] ?? 0); });
    const back = bottoms.map((_, n) => bottoms.length - 1 - n).map((n) => `V${bottoms[n]}H${lefts[n]}`).join("");
    const path = svg("path", { d: `${stepped(below)}${back}Z` });
    path.style.fill = fill(category);
    path.append(svg("title", {}, categories[category] ?? ""));
    return path;
  });
  return [...areas, svg("path", { class: "reserved", d: stepped(points.map((i) => reserved[i] ?? 0)) })];
}

const many = (num: number): string => num.toLocaleString("en");

/** Which events a view shows, and the fullest of them. */
export function rangeOf(recording: Recording, totals: number[], view: View): string {
  const { events, num_events: num } = recording;
  const event = (place: number): number => Math.min(Math.max(Math.round(place * (num + 1) - 1), 0), Math.max(num - 1, 0));
  const [first, last] = within(recording, view);
  let most = first;
  for (let i = first; i < last; i++) if ((totals[i] ?? 0) > (totals[most] ?? 0)) most = i;
  const where = view.to - view.from === 1
    ? `All ${many(num)} events`
    : `Events ${many(event(view.from))} to ${many(event(view.to))} of ${many(num)}`;
  return `${where}; fullest at ${many(events[most] ?? 0)}: ${bytes(totals[most] ?? 0)}`;
}

/** What was live and reserved at a place of the whole. */
export function momentAt(recording: Recording, place: number): string {
  const i = within(recording, { from: place, to: place })[0];
  const sizes = recording.live_bytes.map((live) => live[i] ?? 0);
  const parts = recording.categories
    .map((name, category) => ({ name, size: sizes[category] ?? 0 }))
    .filter(({ size }) => size > 0)
    .map(({ name, size }) => `${name} ${bytes(size)}`);
  const all = sizes.reduce((sum, size) => sum + size, 0);
  return `Event ${many(recording.events[i] ?? 0)}: ${bytes(all)} live${parts.length ? ` (${parts.join(", ")})` : ""}, ${bytes(recording.reserved_bytes[i] ?? 0)} reserved`;
}

/** How finely the recording is in the page. */
export function resolutionOf({ events, num_events: num }: Recording): string {
  if (events.length >= num) return `Each of the ${many(num)} recorded events is drawn.`;
  return `The recording has ${many(num)} events, this page ${many(events.length)} of them: the fullest of every ${many(Math.ceil(num / events.length))} or so. Zooming in shows these one by one, and none of those in between.`;
}
