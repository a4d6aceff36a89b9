// The machine, live: what a server tells each second, until it does not.

import { h } from "./dom";
import { section } from "./frame";
import { type Card, gpuCard } from "./gpu_card";
import type { Frame, History, RunLine } from "./live_data";
import { extended, summary, together } from "./live_words";
import { processTable } from "./process_table";
import { runTable } from "./run_list";

const KEEP_S = 900;
const RUNS_S = 10; // how often the runs are asked for

export type Link = "connecting" | "live" | "lost" | "refused";

export function showMachine(root: HTMLElement, onLink: (link: Link) => void): void {
  const where = h("span", {});
  const title = h("h1", {}, "Looking at the GPUs");
  const given = h("p", { class: "given" });
  const problem = h("p", { class: "warning" });
  const notes = h("p", { class: "note" });
  const cards = h("div", { class: "gpus" });
  const processes = processTable();
  const under = h("div", {});
  const who = section("Processes", processes.element);
  const footer = h("footer", {});
  root.replaceChildren(
    h(
      "main",
      { class: "machine" },
      h("header", {}, h("p", { class: "eyebrow" }, h("b", {}, "oomph serve"), where), title, given),
      problem,
      notes,
      cards,
      under,
      who,
      footer,
    ),
  );
  let past: History = { host: "", user: null, version: "", times: [], gpus: [] };
  let shown: Card[] = [];
  let key = "";
  const show = (frame: Frame): void => {
    past = extended(past, frame, KEEP_S);
    const now = frame.gpus.map(({ uuid, index }) => uuid ?? index).join();
    if (now !== key) {
      key = now;
      shown = frame.gpus.map(gpuCard);
      cards.replaceChildren(...shown.map(({ element }) => element));
    }
    frame.gpus.forEach((gpu, place) => shown[place]?.show(gpu, past.times, past.gpus[place]));
    put(title, summary(frame));
    document.title = `${summary(frame)} · ${past.host}`;
    put(given, together(frame));
    put(problem, frame.problem ?? "");
    put(notes, frame.notes.join("; "));
    who.hidden = !frame.gpus.length;
    processes.show(frame);
  };
  listen(
    (history) => {
      past = history;
      put(where, ` ${history.user ? `${history.user} on ` : ""}${history.host}`);
      put(
        footer,
        `oomph ${history.version}. Kernel-active time is the share of the time with at least one kernel running: it does not tell how much of the GPU each kernel fills.`,
      );
    },
    show,
    (link) => {
      root.classList.toggle("is-stale", link === "lost" || link === "refused");
      onLink(link);
    },
  );
  keepRuns(under);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    shown.forEach((card) => card.redraw()),
  );
}

function put(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** The browser itself connects again; only a refusal is for good. */
function listen(
  onHistory: (history: History) => void,
  onFrame: (frame: Frame) => void,
  onLink: (link: Link) => void,
): void {
  onLink("connecting");
  const source = new EventSource("api/live");
  const parsed = <T>(event: Event): T => JSON.parse((event as MessageEvent<string>).data) as T;
  source.addEventListener("history", (event) => onHistory(parsed<History>(event)));
  source.addEventListener("now", (event) => {
    onFrame(parsed<Frame>(event));
    onLink("live");
  });
  source.addEventListener("error", () =>
    onLink(source.readyState === EventSource.CLOSED ? "refused" : "lost"),
  );
  addEventListener("pagehide", () => source.close());
}

/** The runs that go on now. */
function keepRuns(place: HTMLElement): void {
  const ask = async (): Promise<void> => {
    try {
      const answer = await fetch("api/runs");
      if (!answer.ok) return;
      const { runs } = (await answer.json()) as { runs: RunLine[] };
      const running = runs.filter(({ state }) => state === "running");
      place.replaceChildren(...(running.length ? [section("Runs under way", runTable(running))] : []));
    } catch {
      // The link of the page tells that the server is away; the runs stay as they were.
    }
  };
  void ask();
  setInterval(() => void ask(), 1000 * RUNS_S);
}
