// The machine as it is now -> words and shares. Pure: no document is needed.

import type { Frame, History, Job, LiveGpu, Owner, Past } from "./live_data";
import { bytes } from "./words";

export type Whose = "free" | "mine" | "others" | "shared" | "unknown" | "lost";

/** Whose a GPU is, by the processes that compute on it. */
export function whoseIs(gpu: LiveGpu): Whose {
  if (gpu.used_bytes === null && gpu.processes === null) return "lost";
  const owners = new Set(
    (gpu.processes ?? []).filter(({ kind }) => kind === "compute").map(({ owner }) => owner),
  );
  if (owners.has("mine")) return owners.size > 1 ? "shared" : "mine";
  if (owners.has("others")) return "others";
  return gpu.is_free ? "free" : "unknown";
}

export const WHOSE: Record<Whose, string> = {
  free: "free",
  mine: "yours",
  others: "others’",
  shared: "shared",
  unknown: "cannot tell whose",
  lost: "does not answer",
};

/** The answer at a glance: "3 of 8 GPUs are free; 2 yours, 3 others’". */
export function summary({ gpus, problem }: Frame): string {
  if (!gpus.length) return problem ? "No GPU can be read" : "There is no GPU here";
  const counts = new Map<Whose, number>();
  for (const gpu of gpus) counts.set(whoseIs(gpu), (counts.get(whoseIs(gpu)) ?? 0) + 1);
  const free = counts.get("free") ?? 0;
  const rest = (["mine", "shared", "others", "unknown", "lost"] as Whose[])
    .filter((whose) => counts.get(whose))
    .map((whose) => `${counts.get(whose)} ${COUNTED[whose]}`);
  return [freeOf(free, gpus.length), rest.join(", ")].filter(Boolean).join("; ");
}

const COUNTED: Record<Whose, string> = {
  ...WHOSE,
  unknown: "of which nobody can tell",
  lost: "not answering",
};

function freeOf(free: number, all: number): string {
  if (all === 1) return free ? "The GPU is free" : "The GPU is not free";
  if (!free) return `None of ${all} GPUs is free`;
  if (free === all) return `All ${all} GPUs are free`;
  return `${free} of ${all} GPUs ${free === 1 ? "is" : "are"} free`;
}

/** All of them together: "210.4 of 640.0 GiB in use, 2.31 kW". */
export function together({ gpus }: Frame): string {
  const known = gpus.filter((gpu) => gpu.used_bytes !== null && gpu.total_bytes !== null);
  const sum = (values: (number | null)[]): number =>
    values.reduce<number>((total, value) => total + (value ?? 0), 0);
  const parts: string[] = [];
  if (known.length) {
    const used = sum(known.map((gpu) => gpu.used_bytes));
    const total = sum(known.map((gpu) => gpu.total_bytes));
    parts.push(`${bytes(used)} of ${bytes(total)} in use`);
  }
  const power = gpus.map((gpu) => gpu.power_w).filter((watts) => watts !== null);
  if (power.length) parts.push(watts(sum(power)));
  return parts.join(", ");
}

export const watts = (power: number): string =>
  power >= 1000 ? `${(power / 1000).toFixed(2)} kW` : `${Math.round(power)} W`;

export interface Part {
  whose: Owner | "nobody";
  share: number; // of the GPU's memory
}

/** What the memory bar is made of; what no process is known to hold comes last. */
export function memoryParts(gpu: LiveGpu): Part[] {
  const { used_bytes, total_bytes, held_bytes } = gpu;
  if (used_bytes === null || !total_bytes) return [];
  let left = used_bytes;
  const parts: Part[] = [];
  for (const whose of ["mine", "others", "unknown"] as Owner[]) {
    // The two figures are not of the same moment: together they are never more than what is used.
    const held = Math.min(held_bytes?.[whose] ?? 0, left);
    if (held > 0) parts.push({ whose, share: held / total_bytes });
    left -= held;
  }
  if (left > 0) parts.push({ whose: "nobody", share: left / total_bytes });
  return parts;
}

/** "rank 1 of 4, by torchrun" */
export function partOf({ rank, world_size, launcher }: Job): string {
  const which = rank === null ? "" : `rank ${rank}${world_size === null ? "" : ` of ${world_size}`}`;
  return [which, launcher ? `by ${launcher}` : ""].filter(Boolean).join(", ");
}

/** "14:05:09", of this browser's clock. */
export const timeOfDay = (at: number): string =>
  new Date(1000 * at).toLocaleTimeString("en-GB", { hour12: false });

/** "16 Nov, 14:05" */
export const dayAndTime = (at: number): string =>
  new Date(1000 * at).toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    hour12: false,
  });

const GAP_S = 3; // between two seconds: something was missed, and no line is drawn across

/** The history with one more second; nothing older than `keep` seconds stays. */
export function extended(history: History, frame: Frame, keep: number): History {
  const last = history.times[history.times.length - 1];
  if (last === frame.at) return history;
  // A clock that was set back: what is later than now is not the past.
  if (last !== undefined && frame.at < last)
    return extended({ ...history, times: [], gpus: [] }, frame, keep);
  const isGap = last !== undefined && frame.at - last > GAP_S;
  const times = [...history.times, ...(isGap ? [last + 1] : []), frame.at];
  const from = times.findIndex((at) => at > frame.at - keep);
  const add = (column: (number | null)[] | undefined, value: number | null): (number | null)[] => {
    const before = column ?? history.times.map(() => null);
    return [...before, ...(isGap ? [null] : []), value].slice(from);
  };
  const gpus = frame.gpus.map((gpu, place): Past => {
    const past = history.gpus[place];
    return {
      used_bytes: add(past?.used_bytes, gpu.used_bytes),
      busy_ratio: add(past?.busy_ratio, gpu.busy_ratio),
      power_w: add(past?.power_w, gpu.power_w),
    };
  });
  return { ...history, times: times.slice(from), gpus };
}

/** Shares of the whole, for lines over one axis. */
export const shares = (column: (number | null)[], whole: number | null): (number | null)[] =>
  column.map((value) => (value === null || !whole ? null : value / whole));
