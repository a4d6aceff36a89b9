// What the page "Will it fit?" is told: its choices (src/oomph/serving/questions.py), and the lines
// of a search (src/oomph/serving/searches.py).

import type { Plans } from "./data";

export interface Model {
  name: string;
  num_parameters: number | null;
  most_tokens: number | null; // null: any number, or it is for images
  is_of_images: boolean;
}

export interface GpuChoice {
  name: string;
  title: string;
  memory_bytes: number;
}

export interface Choices {
  models: Model[];
  workloads: string[];
  directory: string | null; // null: no workload files are served
  gpus: GpuChoice[];
  here: string[]; // names of the GPUs in this machine
}

export type Line =
  | { kind: "asked"; command: string }
  | { kind: "waiting"; num_ahead: number; elapsed_s: number }
  | { kind: "progress"; what: string; elapsed_s: number }
  | { kind: "plans"; plans: Plans }
  | { kind: "error"; what: string; because: string | null; try: string | null };

/** What is asked, as it stands in the address of the page and of the request. */
export type Asked = Partial<
  Record<"model" | "workload" | "gpu" | "batch_size" | "seq_len" | "max_gpus", string>
>;

/** "124 M", "8.03 B": three figures, as models are named. */
export function parameters(count: number): string {
  const [unit, name]: [number, string] = count >= 1e9 ? [1e9, "B"] : [1e6, "M"];
  return `${Number((count / unit).toPrecision(3))} ${name}`;
}

/** How far a search is, in words. */
export function status(line: Line): string {
  if (line.kind === "waiting")
    return line.num_ahead === 1
      ? "Another search runs first"
      : `${line.num_ahead} other searches come first`;
  return line.kind === "progress" ? line.what.charAt(0).toUpperCase() + line.what.slice(1) : "";
}

/** The whole lines of a stream as they come, and the rest for the next piece. */
export function linesOf(text: string): { lines: Line[]; rest: string } {
  const parts = text.split("\n");
  const rest = parts.pop() ?? "";
  return { lines: parts.filter(Boolean).map((part) => JSON.parse(part) as Line), rest };
}
