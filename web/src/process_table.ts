// Who is on the GPUs: one row a process, the largest first.

import { h } from "./dom";
import type { Frame, LiveGpu, LiveProcess } from "./live_data";
import { dayAndTime, partOf } from "./live_words";
import { duration } from "./report_words";
import { bytes } from "./words";

export interface ProcessTable {
  element: HTMLElement;
  show(frame: Frame): void;
}

const HEAD = ["GPU", "User", "Memory", "Since", "PID", "Command"];

export function processTable(): ProcessTable {
  const body = h("tbody", {});
  const none = h("p", { class: "note" });
  const table = h(
    "table",
    { class: "listing processes" },
    h("thead", {}, h("tr", {}, ...HEAD.map((name) => h("th", { scope: "col" }, name)))),
    body,
  );
  let before = "";
  return {
    element: h("div", {}, table, none),
    show(frame) {
      const rows = rowsOf(frame.gpus);
      // A row that has not changed is left alone: somebody may be copying from it.
      const now = JSON.stringify([rows, Math.floor(frame.at / 10)]);
      if (now === before) return;
      before = now;
      body.replaceChildren(...rows.map(([gpu, process]) => rowOf(gpu, process, frame.at)));
      table.hidden = !rows.length;
      none.textContent = note(frame.gpus, rows.length);
    },
  };
}

function rowsOf(gpus: LiveGpu[]): [number, LiveProcess][] {
  const rows = gpus.flatMap((gpu) =>
    (gpu.processes ?? []).map((process): [number, LiveProcess] => [gpu.index, process]),
  );
  const size = ([, process]: [number, LiveProcess]): number => process.used_bytes ?? 0;
  return rows.sort((a, b) => size(b) - size(a) || a[0] - b[0]);
}

function rowOf(gpu: number, process: LiveProcess, now: number): HTMLElement {
  const { used_bytes, started_at, user, owner } = process;
  const since = started_at === null ? "unknown" : duration(Math.max(now - started_at, 0));
  const cells: [string, Node | string][] = [
    ["GPU", String(gpu)],
    ["User", h("span", { class: `user held-${owner}` }, user ?? "unknown")],
    ["Memory", used_bytes === null ? "unknown" : bytes(used_bytes)],
    ["Since", h("span", { title: started_at === null ? "" : dayAndTime(started_at) }, since)],
    ["PID", String(process.pid)],
    ["Command", h("div", {}, commandOf(process), jobOf(process))],
  ];
  return h(
    "tr",
    { "data-pid": process.pid },
    ...cells.map(([name, value]) => h("td", { "data-name": name }, value)),
  );
}

function commandOf({ command, is_hidden, note, kind }: LiveProcess): HTMLElement {
  if (command !== null) return h("code", { title: command }, command);
  if (is_hidden) return h("span", { class: "rest" }, "another user’s: shown with a token only");
  return h("span", { class: "rest" }, note ?? (kind === "graphics" ? "a display" : "unknown"));
}

function jobOf({ job }: LiveProcess): HTMLElement | null {
  const words = job ? partOf(job) : "";
  if (!job || (!words && !job.run)) return null;
  const link = job.run && h("a", { href: `?run=${encodeURIComponent(job.run)}` }, `run ${job.run}`);
  return h("span", { class: "rest" }, words, words && link ? ", " : "", link);
}

function note(gpus: LiveGpu[], count: number): string {
  if (gpus.some(({ processes }) => processes === null))
    return "The processes of some GPUs cannot be listed.";
  return count ? "" : "Nobody is on the GPUs.";
}
