// One GPU as it is now: whose, how full, how busy, and how it was in the last quarter of an hour.

import { h, styled } from "./dom";
import type { LiveGpu, Past } from "./live_data";
import { type LiveChart, liveChart } from "./live_chart";
import { WHOSE, type Whose, memoryParts, shares, watts, whoseIs } from "./live_words";
import { percent } from "./report_words";
import { bytes, gib } from "./words";

export interface Card {
  element: HTMLElement;
  show(gpu: LiveGpu, times: number[], past: Past | undefined): void;
  redraw(): void;
}

export function gpuCard(gpu: LiveGpu): Card {
  const badge = h("span", { class: "whose-badge" });
  const bar = h("div", { class: "mem-bar", "aria-hidden": "true" });
  const memory = figure("Memory");
  const busy = figure("Kernel-active");
  const power = figure("Power");
  const heat = figure("Heat");
  const problem = h("p", { class: "warning" });
  const title = gpu.is_slice ? `GPU ${gpu.index}, slice ${gpu.slice}` : `GPU ${gpu.index}`;
  const chart: LiveChart = liveChart(`${title} over the last 15 minutes`);
  const element = h(
    "article",
    { class: "gpu", "aria-label": title, "data-gpu": gpu.index },
    h(
      "header",
      {},
      h("h3", {}, title),
      h("span", { class: "gpu-name", title: gpu.uuid ?? "" }, gpu.name ?? "unknown GPU"),
      badge,
    ),
    bar,
    h("dl", { class: "gpu-figures" }, ...[memory, busy, power, heat].flatMap((one) => one.parts)),
    problem,
    chart.element,
  );
  return {
    element,
    redraw: () => chart.redraw(),
    show(now, times, past) {
      const whose = whoseIs(now);
      if (badge.dataset["whose"] !== whose) badge.replaceChildren(mark(whose), WHOSE[whose]);
      badge.dataset["whose"] = whose;
      element.classList.toggle("is-lost", whose === "lost");
      bar.replaceChildren(...memoryParts(now).map(partOf));
      memory.show(memoryOf(now));
      busy.show(now.busy_ratio === null ? "unknown" : percent(now.busy_ratio), busyNote(now));
      power.show(powerOf(now));
      heat.show(now.temperature_c === null ? "unknown" : `${now.temperature_c} °C`, heldDown(now));
      problem.textContent = now.problem ?? "";
      chart.element.hidden = !past || (now.problem !== null && !past.used_bytes.some(isKnown));
      if (past)
        chart.show({
          times,
          memory: shares(past.used_bytes, now.total_bytes),
          busy: past.busy_ratio,
          power: shares(past.power_w, now.power_limit_w),
        });
    },
  };
}

interface Figure {
  parts: HTMLElement[];
  show(value: string, note?: string): void;
}

function figure(name: string): Figure {
  const [value, note] = [h("b", {}), h("span", { class: "rest" })];
  const put = (element: HTMLElement, text: string): void => {
    if (element.textContent !== text) element.textContent = text;
  };
  return {
    parts: [h("div", {}, h("dt", {}, name), h("dd", {}, value, note))],
    show(text, more = "") {
      put(value, text);
      put(note, more ? ` ${more}` : "");
    },
  };
}

function memoryOf({ used_bytes, total_bytes }: LiveGpu): string {
  if (used_bytes === null) return "unknown";
  return total_bytes === null ? bytes(used_bytes) : `${gib(used_bytes)} of ${bytes(total_bytes)}`;
}

function powerOf({ power_w, power_limit_w }: LiveGpu): string {
  if (power_w === null) return "unknown";
  return power_limit_w === null
    ? watts(power_w)
    : `${Math.round(power_w)} of ${Math.round(power_limit_w)} W`;
}

const busyNote = ({ sm_active_ratio }: LiveGpu): string =>
  sm_active_ratio === null ? "" : `SMs ${percent(sm_active_ratio)}`;

const isKnown = (value: number | null): boolean => value !== null;

const heldDown = ({ throttled_by }: LiveGpu): string =>
  throttled_by.length ? `slowed: ${throttled_by.join(", ")}` : "";

const partOf = ({ whose, share }: { whose: string; share: number }): HTMLElement =>
  styled(h("i", { class: `held-${whose}` }), { width: `${(100 * share).toFixed(2)}%` });

/** Told apart by shape as well as by colour. */
const SHAPES: Record<Whose, string> = {
  free: "○",
  mine: "●",
  others: "▲",
  shared: "◆",
  unknown: "?",
  lost: "✕",
};

const mark = (whose: Whose): HTMLElement =>
  h("span", { class: "whose-mark", "aria-hidden": "true" }, SHAPES[whose]);
