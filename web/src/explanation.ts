// An explanation, shown inside any element: the verdict, memory over time, its layout, who held it.

import { h, styled, svg } from "./dom";
import { section } from "./frame";
import { bytes } from "./words";

interface Held { name: string; size_bytes: number; parts: Held[] }
interface Piece { size_bytes: number; category: number | null }
interface Picture {
  categories: string[];
  events: number[];
  live_bytes: number[][];
  reserved_bytes: number[];
  num_events: number;
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

const FILLS = ["activations", "parameters", "optimizer", "gradients", "temporaries", "inputs", "workspace", "cuda-context"];
const fill = (category: number): string => `var(--c-${FILLS[category] ?? "other"})`;
const WIDTH = 1000;

export function showExplanation(root: HTMLElement, { explanation: found, picture }: Explained): void {
  document.title = found.sentence;
  const read = h("p", { class: "read", "aria-live": "polite" });
  const parts: (HTMLElement | null)[] = [
    h(
      "header",
      {},
      h("p", { class: "eyebrow" }, h("b", {}, "oomph explain"), ` ${found.source}`),
      h("h1", { id: "answer" }, found.sentence),
      h("ul", { class: "reasons" }, ...found.reasons.map((reason) => h("li", {}, reason))),
    ),
    section("Memory over the recording", timeline(picture, found.remedies), legend(picture)),
    picture.segments.length ? section("Where it lay", toScale(picture), layout(picture), read) : null,
    section("Who held it", treemap(picture)),
    section("Who held it, by call", flames(picture)),
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

const drawn = (height: number, label: string, ...children: Node[]): SVGSVGElement =>
  svg("svg", { class: "drawn", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...children);

/** Stacked categories over events; the budget, what settings would need, and the moment. */
function timeline(picture: Picture, tried: Remedy[]): SVGSVGElement {
  const height = 300;
  const { events, live_bytes: live, reserved_bytes: reserved, budget_bytes: limit } = picture;
  const wanted = tried.filter((one) => one.source === "replay" && one.needed_bytes);
  const top = 1.06 * Math.max(...reserved, limit ?? 0, ...wanted.map((one) => one.needed_bytes ?? 0), 1);
  const x = (event: number): number => (WIDTH * (event + 1)) / (picture.num_events + 1);
  const y = (size: number): number => height - (height * size) / top;
  const below = events.map(() => 0);
  const areas = live.map((sizes, category) => {
    const bottom = events.map((event, i) => `${x(event).toFixed(1)} ${y(below[i] ?? 0).toFixed(1)}`);
    sizes.forEach((size, i) => { below[i] = (below[i] ?? 0) + size; });
    const edge = events.map((event, i) => `${x(event).toFixed(1)} ${y(below[i] ?? 0).toFixed(1)}`);
    const path = svg("path", { d: `M${edge.join("L")}L${bottom.reverse().join("L")}Z` });
    path.style.fill = fill(category);
    path.append(svg("title", {}, picture.categories[category] ?? ""));
    return path;
  });
  const line = events.map((event, i) => `${x(event).toFixed(1)} ${y(reserved[i] ?? 0).toFixed(1)}`);
  const marks: Node[] = [svg("path", { class: "reserved", d: `M${line.join("L")}` })];
  if (limit !== null) marks.push(...rule(y(limit), `for PyTorch: ${bytes(limit)}`, "rule"));
  for (const one of wanted.slice(0, 1)) {
    marks.push(...rule(y(one.needed_bytes ?? 0), `needed ${one.name}: ${bytes(one.needed_bytes ?? 0)}`, "here", WIDTH - 4));
  }
  const at = x(picture.at);
  marks.push(svg("path", { class: "here", d: `M${at} 0V${height}` }));
  return drawn(height, "live memory by category over the recorded events", ...areas, ...marks);
}

function rule(y: number, words: string, kind: string, x = 4): Node[] {
  const text = svg("text", { x, y: y - 4, "text-anchor": x > 500 ? "end" : "start" }, words);
  text.style.fill = "var(--ink)";
  return [svg("path", { class: kind, d: `M0 ${y}H${WIDTH}` }), text];
}

const legend = (picture: Picture): HTMLElement =>
  h(
    "ul",
    { class: "legend" },
    ...picture.categories.map((name, category) =>
      h("li", {}, styled(h("i", {}), { background: fill(category) }), name)),
    h("li", {}, "black line: reserved by PyTorch; dashed: the moment that is explained"),
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
function layout(picture: Picture): SVGSVGElement {
  const pieces = picture.segments.flat();
  const total = pieces.reduce((sum, piece) => sum + piece.size_bytes, 0);
  const rows = Math.min(Math.max(Math.ceil(pieces.length / 60), 8), 24);
  const perRow = total / rows;
  const [tall, gap] = [18, 4];
  const shapes: Node[] = [];
  let at = 0;
  for (const piece of pieces) {
    let left = piece.size_bytes;
    while (left > perRow * 1e-6) {
      const row = Math.min(Math.floor(at / perRow + 1e-9), rows - 1);
      const part = row === rows - 1 ? left : Math.min(left, (row + 1) * perRow - at);
      const shape = svg("rect", {
        x: ((WIDTH * (at - row * perRow)) / perRow).toFixed(2),
        y: row * (tall + gap),
        width: ((WIDTH * part) / perRow).toFixed(2),
        height: tall,
        class: piece.category === null ? "hole" : "",
      });
      if (piece.category !== null) shape.style.fill = fill(piece.category);
      const name = piece.category === null ? "hole" : (picture.categories[piece.category] ?? "");
      shape.append(svg("title", {}, `${name}: ${bytes(piece.size_bytes)}`));
      shapes.push(shape);
      at += part;
      left -= part;
    }
  }
  return drawn(rows * (tall + gap) - gap, "the segments, block by block", ...shapes);
}

/** Rectangles in proportion: categories, and their lines within. */
function treemap(picture: Picture): SVGSVGElement {
  const height = 260;
  const shapes: Node[] = [];
  const numbers = new Map(picture.categories.map((name, number) => [name, number]));
  divide(picture.by_category, 0, 0, WIDTH, height, (held, x, y, width, tall) => {
    const colour = fill(numbers.get(held.name) ?? -1);
    divide(held.parts.length ? held.parts : [held], x, y, width, tall, (line, left, top, wide, high) => {
      shapes.push(box(left, top, wide, high, colour, `${held.name}: ${line.name}: ${bytes(line.size_bytes)}`, line.name.slice(line.name.lastIndexOf("/") + 1)));
    });
  });
  return drawn(height, "held memory by category and line", ...shapes);
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
function flames(picture: Picture): SVGSVGElement {
  const shapes: Node[] = [];
  let deepest = 0;
  const total = picture.by_stack.reduce((sum, one) => sum + one.size_bytes, 0) || 1;
  const draw = (held: Held[], x: number, depth: number): void => {
    for (const one of held) {
      const width = (WIDTH * one.size_bytes) / total;
      deepest = Math.max(deepest, depth);
      shapes.push(box(x, depth * 19, width, 18, FLAMES[depth % FLAMES.length] ?? "", `${one.name}: ${bytes(one.size_bytes)}`, one.name));
      draw(one.parts, x, depth + 1);
      x += width;
    }
  };
  draw(picture.by_stack, 0, 0);
  return drawn((deepest + 1) * 19, "held memory by call", ...shapes);
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
  const rows = found.remedies.map((one) => [one.name, figure(one.needed_bytes), verdict(one.helps), one.cost, one.source]);
  return [h("p", { class: "read" }, said), table(["", "needs", "helps", "cost", "by"], rows)];
}
