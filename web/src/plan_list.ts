// Plans that are served, one row each.

import { h } from "./dom";
import { section } from "./frame";
import type { PlanLine } from "./live_data";
import { dayAndTime } from "./live_words";
import { bytes, gib } from "./words";

const HEAD = ["File", "Workload", "GPU", "Memory", "Plans"];

export function showPlanList(root: HTMLElement, plans: PlanLine[], isServed: boolean): void {
  document.title = "Plans · oomph";
  const count = plans.length;
  root.replaceChildren(
    h(
      "main",
      {},
      h(
        "header",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, "oomph serve"), " plans"),
        h("h1", {}, count ? `${count} ${count === 1 ? "file" : "files"} of plans` : "There are no plans"),
        h(
          "p",
          { class: "given" },
          isServed ? "Files of " : "None are served: ",
          h("code", {}, isServed ? "oomph plan --html FILE" : "oomph serve --plans DIRECTORY"),
          isServed ? " and " : "",
          isServed ? h("code", {}, "oomph plan -o FILE") : null,
        ),
      ),
      count ? section("Plans", tableOf(plans)) : null,
    ),
  );
}

const tableOf = (plans: PlanLine[]): HTMLElement =>
  h(
    "table",
    { class: "listing plan-files" },
    h("thead", {}, h("tr", {}, ...HEAD.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...plans.map(rowOf)),
  );

function rowOf(plan: PlanLine): HTMLElement {
  const link = h("a", { href: `?plan=${encodeURIComponent(plan.name)}` }, plan.name);
  const memory =
    plan.device_bytes === null
      ? "nothing fits"
      : `${gib(plan.device_bytes)} of ${bytes(plan.capacity_bytes)}`;
  const cells: [string, Node | string][] = [
    ["File", h("span", { title: dayAndTime(plan.written_at) }, link)],
    ["Workload", `${plan.workload}, batch of ${plan.batch_size}`],
    ["GPU", plan.gpu],
    ["Memory", memory],
    ["Plans", String(plan.num_plans)],
  ];
  return h("tr", {}, ...cells.map(([name, value]) => h("td", { "data-name": name }, value)));
}
