// The plans on the four axes: a table, and cards where the screen is narrow. Roles are spelt out:
// a table that is laid out as cards would lose its own.

import type { Plan, Plans, Prediction } from "./data";
import { h, styled } from "./dom";
import { glyph } from "./scatter";
import { STABILITIES, VERDICTS, gib, resources, room, seconds, settings, times } from "./words";

export interface Table {
  element: HTMLElement;
  choose(place: number): void;
}

const HEADS = {
  Stability: "Stability",
  Memory: "Memory, GiB",
  Resources: "Resources",
  Time: "Time of a step",
};
type Axis = keyof typeof HEADS;

/** The axes on which the plans have something to say: each may be one GPU, or of unknown time. */
function axesOf(plans: Plan[]): Axis[] {
  const isTimed = plans.some((plan) => plan.relative_time !== null || plan.prediction.step_s !== null);
  const isPlain = plans.every((plan) => resources(plan).join() === "1 GPU");
  const left: Partial<Record<Axis, boolean>> = { Resources: isPlain, Time: !isTimed };
  return (Object.keys(HEADS) as Axis[]).filter((axis) => !left[axis]);
}

export function planTable(data: Plans, onChoose: (place: number) => void): Table {
  const widest =
    Math.max(data.capacity_bytes, ...data.plans.map((plan) => plan.prediction.high_bytes)) * 1.04;
  const slowest = Math.max(...data.plans.map((plan) => plan.relative_time ?? 0));
  const axes = axesOf(data.plans);
  const rows = data.plans.map((plan, place) => row(plan, place, axes, widest, slowest, onChoose));
  const head = ["Plan", ...axes.map((axis) => HEADS[axis])];
  const element = h(
    "table",
    { class: "plans", role: "table" },
    h(
      "caption",
      { class: "unseen" },
      "The plans on four axes: stability, memory, resources and time",
    ),
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map(({ element }) => element)),
  );
  return {
    element,
    choose: (chosen) =>
      rows.forEach(({ element, button }, place) => {
        element.classList.toggle("chosen", place === chosen);
        button.setAttribute("aria-pressed", String(place === chosen));
      }),
  };
}

function row(
  plan: Plan,
  place: number,
  axes: Axis[],
  widest: number,
  slowest: number,
  onChoose: (place: number) => void,
) {
  const [split, ...others] = settings(plan);
  const button = h(
    "button",
    { type: "button", class: "row-name", "aria-pressed": "false" },
    h("b", {}, `${place + 1}. ${split}`),
    plan.recommended && h("span", { class: "badge" }, "★ recommended"),
    h("span", { class: "rest" }, others.join(", ")),
  );
  const told: Record<Axis, () => Node | string> = {
    Stability: () =>
      h("span", { class: "stability" }, glyph(plan.stability), STABILITIES[plan.stability].short),
    Memory: () => memory(plan.prediction, widest),
    Resources: () => resources(plan).join(", "),
    Time: () => time(plan, slowest),
  };
  const element = h(
    "tr",
    { role: "row", "data-plan": place, click: () => onChoose(place) },
    h("th", { scope: "row", role: "rowheader" }, button),
    ...axes.map((axis) => h("td", { role: "cell", "data-axis": axis }, told[axis]())),
  );
  return { element, button };
}

/** A bar to scale: the prediction, its error bar and the GPU's limit. */
function memory(prediction: Prediction, widest: number): HTMLElement {
  const { device_bytes, low_bytes, high_bytes, capacity_bytes, fits } = prediction;
  const at = (size: number): string => `${((100 * size) / widest).toFixed(2)}%`;
  return h(
    "div",
    { class: "memory" },
    h(
      "div",
      { class: `bar ${fits}`, "aria-hidden": "true" },
      styled(h("i", { class: "fill" }), { width: at(device_bytes) }),
      styled(h("i", { class: "error" }), {
        left: at(low_bytes),
        width: at(high_bytes - low_bytes),
      }),
      styled(h("i", { class: "end" }), { left: at(capacity_bytes) }),
    ),
    h(
      "div",
      {},
      h("b", {}, gib(device_bytes)),
      ` (${gib(low_bytes)} to ${gib(high_bytes)}) of ${gib(capacity_bytes)}`,
    ),
    h("div", { class: "rest" }, `${VERDICTS[fits]}, ${room(prediction)}`),
  );
}

function time(plan: Plan, slowest: number): HTMLElement {
  const { step_s } = plan.prediction;
  const { micro_batch, accumulation, num_gpus, is_own_batch } = plan.variant;
  const batch = micro_batch * accumulation * num_gpus;
  if (plan.relative_time === null && step_s === null) return h("span", {}, "not known");
  return h(
    "div",
    { class: "time" },
    plan.relative_time !== null &&
      h(
        "div",
        { class: "bar", "aria-hidden": "true" },
        styled(h("i", { class: "fill" }), {
          width: `${(100 * plan.relative_time) / (slowest || 1)}%`,
        }),
      ),
    h(
      "div",
      {},
      plan.relative_time !== null && h("b", {}, times(plan.relative_time)),
      step_s !== null && ` ${seconds(step_s)}`,
    ),
    step_s !== null &&
      !is_own_batch &&
      h("div", { class: "rest" }, `${Number((batch / step_s).toPrecision(3))} samples/s`),
  );
}
