// Time against memory: every plan a mark, its shape its stability, and the front that none beats.

import type { Plan, Stability } from "./data";
import { h, svg } from "./dom";
import { type Point, front, span, ticks } from "./front";
import { STABILITIES, bytes, settings, times, toGib } from "./words";

const EDGE = { left: 40, right: 14, top: 22, bottom: 44 };

/** The mark of a stability: told apart by its shape as well as by its colour. */
export function mark(stability: Stability, radius: number): SVGElement {
  const shape = { class: `mark ${stability}` };
  if (stability === "same") return svg("circle", { ...shape, r: radius });
  const r = radius * 1.25;
  if (stability === "rounding")
    return svg("path", { ...shape, d: `M0 ${-r}L${r} 0L0 ${r}L${-r} 0Z` });
  return svg("path", { ...shape, d: `M0 ${-r}L${r} ${r * 0.75}L${-r} ${r * 0.75}Z` });
}

export const glyph = (stability: Stability): SVGElement =>
  svg(
    "svg",
    { class: "glyph", viewBox: "-8 -8 16 16", "aria-hidden": "true" },
    mark(stability, 5.5),
  );

export interface Scatter {
  element: HTMLElement;
  choose(place: number): void;
}

interface Place extends Point {
  plan: Plan;
  place: number;
}

export function scatter(
  plans: Plan[],
  capacity: number,
  onChoose: (place: number) => void,
): Scatter {
  const timed = plans.flatMap((plan, place): Place[] =>
    plan.relative_time === null
      ? []
      : [{ plan, place, x: plan.relative_time, y: toGib(plan.prediction.device_bytes) }],
  );
  if (!timed.length) {
    return {
      element: h(
        "p",
        { class: "note" },
        "No time is known for this GPU: there is nothing to draw memory against.",
      ),
      choose() {},
    };
  }
  const frame = h("div", {});
  let [chosen, width] = [0, 0];
  const press = (): void =>
    frame
      .querySelectorAll(".point")
      .forEach((mark, i) => mark.setAttribute("aria-pressed", String(timed[i]!.place === chosen)));
  new ResizeObserver(() => {
    if (!frame.clientWidth || frame.clientWidth === width) return;
    width = frame.clientWidth;
    frame.replaceChildren(drawing(timed, toGib(capacity), width, onChoose));
    press();
  }).observe(frame);
  return {
    element: h("figure", { class: "pareto" }, frame, key()),
    choose(place) {
      chosen = place;
      press();
    },
  };
}

/** In the pixels that there are, so that its text is as large as any other. */
function drawing(
  timed: Place[],
  limit: number,
  width: number,
  onChoose: (place: number) => void,
): SVGElement {
  const height = Math.min(Math.max(0.75 * width, 290), 380);
  const [xLow, xHigh] = span(
    timed.map(({ x }) => x),
    0.12,
  );
  const bars = timed.flatMap(({ plan }) => [
    toGib(plan.prediction.low_bytes),
    toGib(plan.prediction.high_bytes),
  ]);
  const [yLow, yHigh] = span([limit, ...bars], 0.1);
  const right = width - EDGE.right;
  const bottom = height - EDGE.bottom;
  const x = (value: number): number =>
    EDGE.left + ((value - xLow) / (xHigh - xLow)) * (right - EDGE.left);
  const y = (value: number): number =>
    bottom - ((value - yLow) / (yHigh - yLow)) * (bottom - EDGE.top);
  const drawn = timed.map((point) => ({ x: x(point.x), y: y(point.y) }));
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Plans by time and memory" },
    ...ticks(yLow, yHigh, 5).flatMap((value) => [
      svg("path", { class: "grid", d: `M${EDGE.left} ${y(value)}H${right}` }),
      svg("text", { class: "axis end", x: EDGE.left - 8, y: y(value) + 4 }, String(value)),
    ]),
    ...ticks(xLow, xHigh, 5).map((value) =>
      svg("text", { class: "axis middle", x: x(value), y: bottom + 18 }, `${value}×`),
    ),
    svg("text", { class: "axis", x: 0, y: 12 }, "GiB on each GPU"),
    svg(
      "text",
      { class: "axis end", x: right, y: height - 6 },
      "time of a step, to the recommended plan",
    ),
    svg("path", { class: "limit", d: `M${EDGE.left} ${y(limit)}H${right}` }),
    svg(
      "text",
      { class: "limit-name", x: right, y: y(limit) - 6 },
      `limit ${limit.toFixed(1)} GiB`,
    ),
    svg("path", { class: "front", d: stairs(front(timed).map((i) => drawn[i]!)) }),
    ...timed.map((point, i) => pointOf(point, drawn[i]!, y, width, onChoose)),
  );
}

function pointOf(
  point: Place,
  at: Point,
  y: (gib: number) => number,
  width: number,
  onChoose: (place: number) => void,
): SVGElement {
  const { plan, place } = point;
  const { low_bytes, high_bytes, device_bytes } = plan.prediction;
  const told = `Plan ${place + 1}${plan.recommended ? ", recommended" : ""}: ${settings(plan).join(", ")}`;
  return svg(
    "g",
    {
      class: "point",
      role: "button",
      tabindex: 0,
      "data-plan": place,
      "aria-pressed": "false",
      "aria-label": `${told}; ${bytes(device_bytes)}, ${times(point.x)} the time, ${STABILITIES[plan.stability].short}`,
      click: () => onChoose(place),
      keydown: (event: KeyboardEvent) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        onChoose(place);
      },
    },
    svg("title", {}, told),
    svg("path", { class: "whisker", d: `M${at.x} ${y(toGib(low_bytes))}V${y(toGib(high_bytes))}` }),
    svg(
      "g",
      { transform: `translate(${at.x} ${at.y})` },
      svg("circle", { class: "halo", r: 16 }),
      mark(plan.stability, 10),
      svg("text", { class: "number", y: plan.stability === "changes" ? 6 : 4 }, String(place + 1)),
      plan.recommended &&
        svg("text", { class: "tag", ...besides(at.x > width / 2) }, "recommended"),
    ),
  );
}

const besides = (isLeft: boolean): { x: number; y: number; "text-anchor": string } =>
  isLeft ? { x: -20, y: 4, "text-anchor": "end" } : { x: 20, y: 4, "text-anchor": "start" };

/** A staircase from one to the next. */
const stairs = (points: Point[]): string =>
  points.map(({ x, y }, i) => (i ? `H${x}V${y}` : `M${x} ${y}`)).join("");

const key = (): HTMLElement =>
  h(
    "figcaption",
    { class: "key" },
    ...(Object.keys(STABILITIES) as Stability[]).map((stability) =>
      h("span", {}, glyph(stability), STABILITIES[stability].short),
    ),
    h(
      "span",
      {},
      svg(
        "svg",
        { class: "glyph wide", viewBox: "0 0 24 16", "aria-hidden": "true" },
        svg("path", { class: "front", d: "M1 3H12V13H23" }),
      ),
      "beaten by none on both",
    ),
  );
