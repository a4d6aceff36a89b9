// Several reports -> the lines that are laid over each other, by the time since each began. Pure.

import type { Gpu, GpuPage, ReportPage, Series } from "./report_data";

export const MOST_OVERLAID = 6; // as many colours are told apart

export interface Overlaid {
  name: string; // "A"
  colour: string; // a name of the style sheet
  gpu: Gpu | null;
  page: GpuPage | null;
  data: ReportPage;
}

/** Each run with a letter, a colour, and the fullest of its GPUs. */
export function overlaid(reports: ReportPage[]): Overlaid[] {
  return reports.slice(0, MOST_OVERLAID).map((data, place) => {
    const at = fullest(data.report.gpus);
    return {
      name: String.fromCharCode(65 + place),
      colour: `run-${place + 1}`,
      gpu: data.report.gpus[at] ?? null,
      page: data.gpus[at] ?? null,
      data,
    };
  });
}

function fullest(gpus: Gpu[]): number {
  let best = 0;
  gpus.forEach((gpu, place) => {
    if ((gpu.memory.peak_bytes ?? -1) > (gpus[best]?.memory.peak_bytes ?? -1)) best = place;
  });
  return best;
}

/** The words that not all commands have: what differs between runs of one script. */
export function differences(commands: string[][]): string[] {
  const isShared = (word: string): boolean => commands.every((words) => words.includes(word));
  return commands.map((words) => words.filter((word) => !isShared(word)).join(" "));
}

export const stepsOf = ({ data, gpu }: Overlaid): Series | null =>
  (data.steps.find(({ rank }) => rank === gpu?.rank) ?? data.steps[0])?.step_series ?? null;
