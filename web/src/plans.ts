// The plans, shown inside any element: what a page has in its data, or what a server sent.

import type { Plan, Plans, Prediction } from "./data";
import { h, styled } from "./dom";
import { bringIntoSight, printWell, section } from "./frame";
import { caveatsOf, codeOf, listsOf, tilesOf } from "./parts";
import { scatter } from "./scatter";
import { planTable } from "./table";
import { timelineChart } from "./timeline";
import { againstTheFirst, asGiven, bytes, headline, times, wayOut } from "./words";

/** Until the `signal`, the plans follow the address, the colours and the printer. */
export function showPlans(root: HTMLElement, given: Plans, signal?: AbortSignal): void {
  const data = againstTheFirst(given);
  const { plans } = data;
  const title = h("h1", { id: "answer", "aria-live": "polite" });
  const why = h("p", { class: "why" });
  const head = h(
    "header",
    {},
    h(
      "p",
      { class: "eyebrow" },
      h("b", {}, "oomph plan"),
      ` ${data.workload}, ${data.is_own_batch ? "its own batch" : `batch of ${data.batch_size}`}, on ${data.gpu}`,
    ),
    title,
    why,
    h("p", { class: "given" }, asGiven(data)),
  );
  if (!plans.length) {
    title.textContent = document.title = headline(data, null);
    why.textContent = wayOut(data);
    root.replaceChildren(h("main", {}, head, data.as_is && asGivenParts(data.as_is), data.caveats.length ? section("Good to know", caveatsOf(data)) : null, ...listsOf(data, null)));
    return;
  }
  const tiles = h("div", { class: "tiles" });
  const code = h("div", { class: "code" });
  const unknowns = h("div", {});
  const chart = timelineChart(plans, data.capacity_bytes);
  const choose = (place: number): void => {
    const plan = plans[place];
    if (!plan) return;
    title.textContent = document.title = headline(data, plan);
    why.replaceChildren(
      h("b", {}, plan.recommended ? "Recommended: " : `Plan ${place + 1}: `),
      plan.why,
    );
    tiles.replaceChildren(...tilesOf(plan));
    const parts = codeOf(plan, place);
    code.classList.toggle("both", parts.length > 1);
    code.replaceChildren(...parts);
    unknowns.replaceChildren(...listsOf(data, plan));
    chart.show(plan);
    pills.forEach((pill, i) => pill.setAttribute("aria-pressed", String(i === place)));
    bringIntoSight(pills[place]);
    table.choose(place);
    pareto.choose(place);
  };
  const chosen = (place: number): void => {
    choose(place);
    history.replaceState(null, "", `#plan-${place + 1}`);
  };
  const pills = plans.map((plan, place) => pill(plan, place, () => chosen(place)));
  const table = planTable(data, chosen);
  const pareto = scatter(plans, data.capacity_bytes, chosen);
  root.replaceChildren(
    h(
      "main",
      {},
      head,
      plans.length > 1 ? h("nav", { class: "pills", "aria-label": "Plans" }, ...pills) : null,
      tiles,
      section("One training step in memory", chart.element),
      section(plans.length > 1 ? "The plans" : "The plan", table.element),
      section("What to change", code),
      h(
        "div",
        { class: "two" },
        plans.length > 1 ? section("Time against memory", pareto.element) : null,
        data.caveats.length ? section("Good to know", caveatsOf(data)) : null,
      ),
      unknowns,
      h(
        "footer",
        {},
        `oomph ${data.version}${compared(data)}. Predicted without a GPU; nothing was trained.`,
      ),
    ),
  );
  const fromAddress = (): number =>
    Math.max(Number(/^#plan-(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1, 0);
  choose(Math.min(fromAddress(), plans.length - 1));
  const follow = (): void => choose(Math.min(fromAddress(), plans.length - 1));
  addEventListener("hashchange", follow, { signal });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => chart.redraw(), { signal });
  printWell(chart.redraw, signal);
}

const compared = ({ num_candidates }: Plans): string =>
  num_candidates === null ? "" : ` compared ${num_candidates.toLocaleString("en")} ways to train`;

function pill(plan: Plan, place: number, onClick: () => void): HTMLButtonElement {
  const time = plan.relative_time === null ? "" : ` · ${times(plan.relative_time)}`;
  return h(
    "button",
    {
      type: "button",
      class: plan.recommended ? "pill best" : "pill",
      "data-plan": place,
      "aria-pressed": "false",
      click: onClick,
    },
    h("b", {}, plan.recommended ? `★ Plan ${place + 1}` : `Plan ${place + 1}`),
    h("span", {}, `${bytes(plan.prediction.device_bytes)}${time}`),
  );
}

/** What the workload is made of as it was given: all there is to show where nothing fits. */
function asGivenParts(prediction: Prediction): HTMLElement {
  const rows = Object.entries(prediction.by_category).map(([name, size]) =>
    h(
      "li",
      {},
      h("span", {}, name),
      h(
        "span",
        { class: "track" },
        styled(h("i", {}), { width: `${(100 * size) / prediction.device_bytes}%` }),
      ),
      h("span", { class: "figure" }, bytes(size)),
    ),
  );
  return section("What the peak is made of, as given", h("ul", { class: "bars" }, ...rows));
}
