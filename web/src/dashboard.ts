// The page of `oomph serve`: what is shown stands in the address, so that it can be kept and sent.
//   ./   the machine     ?runs   ?run=ID     ?compare=ID,ID     ?plans   ?plan=NAME
//   ?fit&model=...

import { showCompared } from "./compare_view";
import type { Plans } from "./data";
import { h } from "./dom";
import type { Choices } from "./fit_data";
import { showFit } from "./fit_view";
import type { PlanLine, RunLine } from "./live_data";
import { type Link, showMachine } from "./machine_view";
import { MOST_OVERLAID } from "./overlaid";
import { showPlanList } from "./plan_list";
import { showPlans } from "./plans";
import type { ReportPage } from "./report_data";
import { showRuns } from "./run_list";
import { showRun } from "./run_view";

const LINKS: Record<Link, string> = {
  connecting: "connecting",
  live: "live",
  lost: "not connected, trying again",
  refused: "refused: open the address that oomph serve printed",
};

/** What a server says of an address, or its error in words. */
async function ask<T>(address: string): Promise<T> {
  const answer = await fetch(address);
  const isJson = answer.headers.get("content-type")?.startsWith("application/json");
  const content = isJson ? ((await answer.json()) as T & { error?: string }) : null;
  if (!answer.ok || !content) throw new Error(content?.error ?? `${answer.status} ${answer.statusText}`);
  return content;
}

function top(place: HTMLElement, asked: URLSearchParams): (link: Link) => void {
  const status = h("span", { class: "link", role: "status" });
  const here = ["run", "runs", "compare"].some((name) => asked.has(name))
    ? "Runs"
    : ["plan", "plans"].some((name) => asked.has(name))
      ? "Plans"
      : asked.has("fit")
        ? "Will it fit?"
        : "Machine";
  const links = [
    ["Machine", "./"],
    ["Runs", "?runs"],
    ["Plans", "?plans"],
    ["Will it fit?", "?fit"],
  ].map(([name, address]) =>
    h("a", { href: address, "aria-current": name === here ? "page" : null }, name),
  );
  place.replaceChildren(
    h("nav", { class: "top", "aria-label": "Pages" }, h("b", {}, "oomph"), ...links, status),
  );
  return (link) => {
    if (status.dataset["link"] === link) return;
    status.dataset["link"] = link;
    status.textContent = LINKS[link];
  };
}

async function show(page: HTMLElement, asked: URLSearchParams, onLink: (link: Link) => void): Promise<void> {
  const [run, plan] = [asked.get("run"), asked.get("plan")];
  if (run) return showRun(page, () => ask(`api/runs/${encodeURIComponent(run)}`));
  if (plan) return showPlans(page, await ask<Plans>(`api/plans/${encodeURIComponent(plan)}`));
  if (asked.has("runs")) {
    const { runs, num_runs } = await ask<{ runs: RunLine[]; num_runs: number }>("api/runs");
    return showRuns(page, runs, num_runs, asked, () => ask("api/figures"));
  }
  const compared = asked.get("compare");
  if (compared) {
    const ids = compared.split(",").slice(0, MOST_OVERLAID);
    const found = ids.map((id) => ask<{ page: ReportPage }>(`api/runs/${encodeURIComponent(id)}`));
    return showCompared(page, (await Promise.all(found)).map((answer) => answer.page));
  }
  if (asked.has("fit")) return showFit(page, await ask<Choices>("api/fit/choices"), asked);
  if (asked.has("plans")) {
    const { plans, is_served } = await ask<{ plans: PlanLine[]; is_served: boolean }>("api/plans");
    return showPlanList(page, plans, is_served);
  }
  showMachine(page, onLink);
}

function showError(page: HTMLElement, error: unknown): void {
  const told = error instanceof Error ? error.message : String(error);
  document.title = "oomph";
  page.replaceChildren(
    h("main", {}, h("h1", {}, "This cannot be shown"), h("p", { class: "why" }, told)),
  );
}

const [bar, page] = [document.getElementById("top"), document.getElementById("page")];
if (bar && page) {
  const asked = new URLSearchParams(location.search);
  const onLink = top(bar, asked);
  show(page, asked, onLink).catch((error: unknown) => showError(page, error));
}
