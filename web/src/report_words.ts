// Times and figures of a report -> words. Pure: no document is needed.

const UNITS: [number, string, number, string][] = [
  [86400, "d", 3600, "h"],
  [3600, "h", 60, "min"],
  [60, "min", 1, "s"],
];

/** As oomph.units.format_duration writes it. */
export function duration(seconds: number): string {
  const total = Math.max(0, Math.floor(seconds));
  for (const [unit, name, smaller, smallerName] of UNITS) {
    if (total < unit) continue;
    const rest = Math.floor((total % unit) / smaller);
    return `${Math.floor(total / unit)} ${name}${rest ? ` ${rest} ${smallerName}` : ""}`;
  }
  return `${total} s`;
}

/** A mark of the axis of time: "1:02:03", "2:05", "0:07". */
export function clock(seconds: number): string {
  const total = Math.round(seconds);
  const two = (value: number): string => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor(total / 60) % 60];
  const rest = two(total % 60);
  return hours ? `${hours}:${two(minutes)}:${rest}` : `${minutes}:${rest}`;
}

// Distances of the marks of an axis of time, in seconds: what a clock has.
export const STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800,
  604800,
];

export const percent = (ratio: number): string => `${Math.round(100 * ratio)} %`;

/** Three figures: "0.0421 s", "1.39 s". */
export const seconds = (time: number): string =>
  time >= 1 ? `${Number(time.toPrecision(3))} s` : `${Number((1000 * time).toPrecision(3))} ms`;

export type Tone = "bad" | "good" | "look" | "plain";

const BAD = new Set(["out-of-memory", "maybe-out-of-memory", "hang", "leak", "spill"]);

/** How a finding is to be taken. */
export function toneOf(kind: string): Tone {
  if (BAD.has(kind)) return "bad";
  if (kind === "no-out-of-memory" || kind === "busy") return "good";
  if (["not-ended", "too-short", "head-room", "no-gpu"].includes(kind)) return "plain";
  return "look";
}

export const CONFIDENCES: Record<string, string> = {
  measured: "measured by a source that can see it",
  inferred: "inferred from signs that usually mean it",
  weak: "weak: the signs can mean something else as well",
};
