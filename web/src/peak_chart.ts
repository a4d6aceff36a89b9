// What a plan's peak is made of, as one bar to the scale of the GPU: all that plan.json knows of a
// step's memory.

import type { Plan } from "./data";
import { colourOf, h, styled } from "./dom";
import { CONTEXT, type Layer, contextBytes } from "./stack";
import { bytes, toGib } from "./words";

/** The layers of the peak, from the bottom up: those that last come first. */
export function layersAtPeak(plan: Plan): Layer[] {
  const { by_category } = plan.prediction;
  const last = ["parameters", "optimizer", "gradients", "workspace", "inputs", "activations"];
  const rank = (name: string): number => (last.indexOf(name) + last.length + 1) % (last.length + 1);
  const own = Object.entries(by_category).sort(([a], [b]) => rank(a) - rank(b));
  let below = 0;
  return [[CONTEXT, contextBytes(plan)] as [string, number], ...own].map(([name, size]) => ({
    name,
    bytes: [size],
    tops: [toGib((below += size))],
  }));
}

export function peakBar(plan: Plan, capacity: number, highest: number): HTMLElement {
  const { device_bytes, low_bytes, high_bytes } = plan.prediction;
  const at = (size: number): string => `${((100 * size) / highest).toFixed(2)}%`;
  const parts = layersAtPeak(plan).map((layer) =>
    styled(h("i", { title: `${layer.name}: ${bytes(layer.bytes[0] ?? 0)}` }), {
      width: at(layer.bytes[0] ?? 0),
      background: `var(--${colourOf(layer.name)}, var(--c-other))`,
    }),
  );
  const limit = styled(h("span", { class: "end" }, h("b", {}, `limit ${bytes(capacity)}`)), {
    left: at(capacity),
  });
  const error = styled(h("span", { class: "error" }), {
    left: at(low_bytes),
    width: at(high_bytes - low_bytes),
  });
  const held = styled(h("span", { class: "held" }), { width: at(device_bytes) });
  return h(
    "div",
    { class: "peak", "aria-hidden": "true" }, // the list beside it tells the same
    h("div", { class: "peak-bar" }, held, ...parts, error, limit),
  );
}
