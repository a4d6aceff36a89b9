// The report on one run; while it goes on, again and again.

import { h } from "./dom";
import type { ReportPage } from "./report_data";
import { type Shown, showReport } from "./reports";

const AGAIN_S = 5;

interface Answer {
  state: "running" | "ended" | "unknown";
  page: ReportPage;
}

export async function showRun(root: HTMLElement, ask: () => Promise<Answer>): Promise<void> {
  const bar = h("p", { class: "under-way", role: "status" });
  const pause = h("button", { type: "button", class: "copy" }, "Pause");
  const page = h("div", {});
  let isPaused = false;
  let shown: Shown | null = null;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.textContent = isPaused ? "Go on" : "Pause";
  });
  root.replaceChildren(bar, page);
  const show = ({ state, page: data }: Answer): boolean => {
    const place = shown?.place() ?? 0;
    const top = scrollY;
    shown?.end();
    shown = showReport(page, data, place);
    scrollTo(0, top); // the reader stays where they are
    const goesOn = state === "running";
    bar.hidden = !goesOn;
    if (goesOn && !bar.hasChildNodes())
      bar.append(h("b", {}, "Under way"), " This is the run so far. ", pause);
    return goesOn;
  };
  let goesOn = show(await ask());
  while (goesOn) {
    await new Promise((resolve) => setTimeout(resolve, 1000 * AGAIN_S));
    if (isPaused || document.hidden) continue;
    try {
      goesOn = show(await ask());
    } catch {
      bar.classList.add("is-stale"); // the server is away; what it told is still true
    }
  }
}
