// An explanation, shown inside any element: the verdict, memory over time, its layout, who held it.

import { h, styled, svg } from "./dom";
import { section } from "./frame";
import { type Recording, chosen, fill, momentAt, paths, placeOf, rangeOf, resolutionOf, totalsOf } from "./recording_chart";
import { bytes } from "./words";
import { type View, spanOf, zoomable } from "./zoom";

interface Held { name: string; size_bytes: number; parts: Held[] }
interface Piece { size_bytes: number; category: number | null }
interface Picture extends Recording {
  at: number;
  budget_bytes: number | null;
  requested_bytes: number | null;
  segments: Piece[][];
  largest_hole_bytes: number;
  by_category: Held[];
  by_stack: Held[];
}
interface Remedy { name: string; needed_bytes: number | null; helps: boolean | null; cost: string; source: string }
interface Share { name: string; size_bytes: number | null; note: string }
interface Growth { name: string; grown_bytes: number; per_step_bytes: number | null; since_step: number | null }
export interface Explained {
  explanation: {
    source: string;
    sentence: string;
    reasons: string[];
    budget: Share[];
    gate: { num_exact: number; num_recorded: number; problem: string | null } | null;
    growth: Growth[];
    remedies: Remedy[];
    caveats: string[];
    next_command: string | null;
  };
  picture: Picture;
}

export function showExplanation(root: HTMLElement, { explanation: found, picture }: Explained): void {
  document.title = found.sentence;
  const parts: (HTMLElement | null)[] = [
    h(
      "header",
      {},
      h("p", { class: "eyebrow" }, h("b", {}, "oomph explain"), ` ${found.source}`),
      h("h1", { id: "answer" }, found.sentence),
      h("ul", { class: "reasons" }, ...found.reasons.map((reason) => h("li", {}, reason))),
    ),
    section("Memory over the recording", timeline(picture, found.remedies), legend(picture), h("p", { class: "note" }, resolutionOf(picture))),
    picture.segments.length ? section("Where it lay", toScale(picture), layout(picture)) : null,
    section("Who held it", fitted((width) => treemap(picture, width))),
    section("Who held it, by call", fitted((width) => flames(picture, width))),
    found.growth.length ? section("What grew", growth(found.growth)) : null,
    found.remedies.length ? section("What would have avoided it", ...remedies(found)) : null,
    section("Memory", budget(found.budget)),
    found.caveats.length
      ? section("Good to know", h("ul", { class: "reasons" }, ...found.caveats.map((one) => h("li", {}, one))))
      : null,
    found.next_command ? section("Next", h("pre", {}, h("code", {}, found.next_command))) : null,
  ];
  root.replaceChildren(h("main", {}, ...parts));
}

const drawn = (width: number, height: number, label: string, ...children: Node[]): SVGSVGElement =>
  svg("svg", { class: "drawn", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);

/** A drawing in its real width: its words are as large on a phone as on a desk. */
function fitted(draw: (width: number) => SVGSVGElement): HTMLElement {
  const frame = h("div", {}, draw(1000));
  let width = 1000;
  new ResizeObserver(() => {
    if (!frame.clientWidth || frame.clientWidth === width) return;
    width = frame.clientWidth;
    frame.replaceChildren(draw(width));
  }).observe(frame);
  return frame;
}

const FEWEST_EVENTS = 12; // in the closest view of the timeline

/** Stacked categories over events; the budget, what settings would need, and the moment. */
function timeline(picture: Picture, tried: Remedy[]): HTMLElement {
  const height = 300;
  const { reserved_bytes: reserved, budget_bytes: limit, events } = picture;
  const totals = totalsOf(picture);
  const [wanted] = tried.filter((one) => one.source === "replay" && one.needed_bytes);
  const needed = wanted?.needed_bytes ?? 0;
  const highest = [reserved, totals].flat().reduce((most, size) => Math.max(most, size), 1);
  const top = 1.06 * Math.max(highest, limit ?? 0, needed);
  const y = (size: number): number => height - (height * size) / top;
  const label = "live memory by category over the recorded events";
  return zoomable({
    label,
    whole: "whole recording",
    least: FEWEST_EVENTS / (picture.num_events + 1),
    marks: true,
    range: (view) => rangeOf(picture, totals, view),
    at: (view, share) => momentAt(picture, view.from + share * spanOf(view)),
    draw(view, width) {
      const x = (event: number): number => (width * (placeOf(event, picture) - view.from)) / spanOf(view);
      const points = chosen(picture, totals, view, width);
      const next = events[(points[points.length - 1] ?? 0) + 1] ?? picture.num_events;
      const marks: Node[] = paths(picture, points, x, x(next), y);
      if (limit !== null) marks.push(...rule(y(limit), width, `for PyTorch: ${bytes(limit)}`, "rule", 4));
      if (wanted) marks.push(...rule(y(needed), width, `needed ${wanted.name}: ${bytes(needed)}`, "here", width - 4));
      marks.push(svg("path", { class: "here", d: `M${x(picture.at)} 0V${height}` }));
      return drawn(width, height, label, ...marks);
    },
  });
}

function rule(y: number, width: number, words: string, kind: string, x: number): Node[] {
  const text = svg("text", { x, y: y - 4, "text-anchor": x > width / 2 ? "end" : "start" }, words);
  text.style.fill = "var(--ink)";
  return [svg("path", { class: kind, d: `M0 ${y}H${width}` }), text];
}

const legend = (picture: Picture): HTMLElement =>
  h(
    "ul",
    { class: "legend" },
    ...picture.categories.map((name, category) =>
      h("li", {}, styled(h("i", {}), { background: fill(category) }), name)),
    h("li", {}, "thin line: reserved by PyTorch; dashed: the moment that is explained"),
  );

/** The request that failed beside the largest hole, on one scale. */
function toScale(picture: Picture): HTMLElement {
  const { requested_bytes: asked, largest_hole_bytes: hole } = picture;
  if (asked === null) return h("p", { class: "read" }, `largest hole: ${bytes(hole)}`);
  const most = Math.max(asked, hole, 1);
  const bar = (size: number, kind: string): HTMLElement =>
    styled(h("b", { class: kind }), { width: `${Math.max((100 * size) / most, 0.3)}%` });
  return h("div", { class: "scale" }, `requested, ${bytes(asked)}`, bar(asked, "asked"), `largest hole, ${bytes(hole)}`, bar(hole, "hole"));
}

/** Segments one after the other, on as many rows as they need; holes are empty. */
function layout(picture: Picture): HTMLElement {
  const pieces = picture.segments.flatMap((segment, number) => segment.map((piece) => ({ ...piece, segment: number })));
  let total = 0;
  const starts = pieces.map(({ size_bytes: size }) => (total += size) - size);
  const sizes = picture.segments.map((segment) => segment.reduce((sum, piece) => sum + piece.size_bytes, 0));
  const rows = Math.min(Math.max(Math.ceil(pieces.length / 60), 8), 24);
  const [tall, gap] = [18, 4];
  const height = rows * (tall + gap) - gap;
  const label = "the segments, block by block";
  const name = (category: number | null): string =>
    category === null ? "hole" : (picture.categories[category] ?? "");

  /** The last piece that begins at or before this byte. */
  const pieceAt = (byte: number): number => {
    let [low, high] = [0, starts.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle]! <= byte) low = middle + 1;
      else high = middle;
    }
    return Math.max(low - 1, 0);
  };
  return zoomable({
    label,
    whole: "all segments",
    least: (rows * CLOSEST_ROW_BYTES) / total,
    shareAt: (x, y) => (Math.min(Math.max(Math.floor(y * rows), 0), rows - 1) + x) / rows,
    range: (view) => (spanOf(view) === 1
      ? `All ${bytes(total)} in ${picture.segments.length.toLocaleString("en")} segments`
      : `${bytes(spanOf(view) * total)} of ${bytes(total)}`),
    at(view, share) {
      const piece = pieces[pieceAt((view.from + share * spanOf(view)) * total)];
      if (!piece) return "";
      return `${name(piece.category)}: ${bytes(piece.size_bytes)}, in segment ${piece.segment + 1} of ${bytes(sizes[piece.segment] ?? 0)}`;
    },
    draw: (view, width) => drawn(width, height, label, ...blocks(view, width)),
  });

  function blocks({ from, to }: View, width: number): Node[] {
    const [begin, end] = [from * total, to * total];
    const perRow = (end - begin) / rows;
    const shapes: Node[] = [];
    const edges: string[] = [];
    for (let i = pieceAt(begin); i < pieces.length && starts[i]! < end; i++) {
      const piece = pieces[i]!;
      const until = Math.min(starts[i]! + piece.size_bytes, end);
      for (let at = Math.max(starts[i]!, begin); until - at > perRow * 1e-6; ) {
        const row = Math.min(Math.floor((at - begin) / perRow + 1e-9), rows - 1);
        const part = row === rows - 1 ? until - at : Math.min(until, begin + (row + 1) * perRow) - at;
        const x = (width * (at - begin - row * perRow)) / perRow;
        if (at === starts[i] && piece.segment !== pieces[i - 1]?.segment) edges.push(`M${x.toFixed(2)} ${row * (tall + gap) - 2}v${tall + 4}`);
        const shape = svg("rect", { x: x.toFixed(2), y: row * (tall + gap), width: ((width * part) / perRow).toFixed(2), height: tall, class: piece.category === null ? "hole" : "" });
        if (piece.category !== null) shape.style.fill = fill(piece.category);
        shapes.push(shape);
        at += part;
      }
    }
    return [...shapes, svg("path", { class: "edge", d: edges.join("") })];
  }
}
const CLOSEST_ROW_BYTES = 2 ** 18;

/** Rectangles in proportion: categories, and their lines within. */
function treemap(picture: Picture, whole: number): SVGSVGElement {
  const height = 260;
  const shapes: Node[] = [];
  const numbers = new Map(picture.categories.map((name, number) => [name, number]));
  divide(picture.by_category, 0, 0, whole, height, (held, x, y, width, tall) => {
    const colour = fill(numbers.get(held.name) ?? -1);
    divide(held.parts.length ? held.parts : [held], x, y, width, tall, (line, left, top, wide, high) => {
      shapes.push(box(left, top, wide, high, colour, `${held.name}: ${line.name}: ${bytes(line.size_bytes)}`, line.name.slice(line.name.lastIndexOf("/") + 1)));
    });
  });
  return drawn(whole, height, "held memory by category and line", ...shapes);
}

type Place = (held: Held, x: number, y: number, width: number, height: number) => void;

/** Halve by size, along the longer side. */
function divide(held: Held[], x: number, y: number, width: number, height: number, place: Place): void {
  const [first] = held;
  if (!first) return;
  if (held.length === 1) return place(first, x, y, width, height);
  const total = held.reduce((sum, one) => sum + one.size_bytes, 0);
  let [cut, before] = [1, first.size_bytes];
  while (cut < held.length - 1 && before < total / 2) before += held[cut++]?.size_bytes ?? 0;
  const share = before / total;
  if (width > height) {
    divide(held.slice(0, cut), x, y, width * share, height, place);
    divide(held.slice(cut), x + width * share, y, width * (1 - share), height, place);
  } else {
    divide(held.slice(0, cut), x, y, width, height * share, place);
    divide(held.slice(cut), x, y + height * share, width, height * (1 - share), place);
  }
}

function box(x: number, y: number, width: number, height: number, colour: string, title: string, words: string): Node {
  const shape = svg("rect", { x: x.toFixed(2), y: y.toFixed(2), width: width.toFixed(2), height: height.toFixed(2) });
  shape.style.fill = colour;
  const room = Math.floor((width - 8) / 6.2);
  const text = room > 3 && height > 14
    ? svg("text", { x: (x + 4).toFixed(2), y: (y + 12).toFixed(2) }, words.length > room ? `${words.slice(0, room - 1)}…` : words)
    : null;
  return svg("g", {}, svg("title", {}, title), shape, text);
}

/** The call tree of what is held, the outermost call on top; as wide as what it holds. */
function flames(picture: Picture, whole: number): SVGSVGElement {
  const shapes: Node[] = [];
  let deepest = 0;
  const total = picture.by_stack.reduce((sum, one) => sum + one.size_bytes, 0) || 1;
  const draw = (held: Held[], x: number, depth: number): void => {
    for (const one of held) {
      const width = (whole * one.size_bytes) / total;
      deepest = Math.max(deepest, depth);
      shapes.push(box(x, depth * 19, width, 18, FLAMES[depth % FLAMES.length] ?? "", `${one.name}: ${bytes(one.size_bytes)}`, one.name));
      draw(one.parts, x, depth + 1);
      x += width;
    }
  };
  draw(picture.by_stack, 0, 0);
  return drawn(whole, (deepest + 1) * 19, "held memory by call", ...shapes);
}
const FLAMES = ["var(--c-activations)", "var(--c-temporaries)", "var(--c-workspace)"];

const table = (heads: string[], rows: (string | HTMLElement)[][]): HTMLElement =>
  h(
    "table",
    { class: "rows" },
    heads.length ? h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", {}, head)))) : null,
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell) => (typeof cell === "string" ? h("td", {}, cell) : cell))))),
  );
const figure = (size: number | null): HTMLElement => h("td", { class: "figure" }, size === null ? "" : bytes(size));

const budget = (shares: Share[]): HTMLElement =>
  table([], shares.map((one) => [one.name, figure(one.size_bytes), one.note]));

const growth = (found: Growth[]): HTMLElement =>
  table(["grown", "per step", "since", "from"], found.map((one) => [
    figure(one.grown_bytes),
    figure(one.per_step_bytes),
    one.since_step === null ? "" : `step ${one.since_step}`,
    one.name,
  ]));

function remedies(found: Explained["explanation"]): HTMLElement[] {
  const { gate } = found;
  const said = gate === null ? "" : `The replay put ${gate.num_exact.toLocaleString("en")} of ${gate.num_recorded.toLocaleString("en")} recorded allocations at their addresses.`;
  const verdict = (helps: boolean | null): HTMLElement =>
    h("td", { class: helps === null ? "" : helps ? "yes" : "no" }, helps === null ? "?" : helps ? "yes" : "no");
  const words = (text: string): HTMLElement => h("td", { class: "words" }, text);
  const rows = found.remedies.map((one) => [one.name, figure(one.needed_bytes), verdict(one.helps), words(one.cost), words(one.source)]);
  return [h("p", { class: "read" }, said), table(["", "needs", "helps", "cost", "by"], rows)];
}
