// What the page of a report is given: the record (src/oomph/records/report.py) as JSON, its
// sentences, and series to draw (src/oomph/showing/report_page.py).

export type Confidence = "measured" | "inferred" | "weak";

export interface Finding {
  kind: string;
  sentence: string;
  evidence: string[];
  confidence: Confidence;
  advice: string[];
  gpus: number[];
}

export interface Gap {
  began_s: number;
  ended_s: number;
  phase: string | null;
}

/** The command stood still, as by Ctrl-Z. */
export interface Halt {
  began_s: number;
  ended_s: number;
}

export interface Phase {
  name: string;
  began_s: number;
  ended_s: number;
  rank: number | null;
}

export interface Mark {
  at_s: number;
  kind: string;
  text: string;
  gpu: number | null;
}

export interface Gpu {
  gpu: number;
  index: number;
  cuda_index: number | null;
  rank: number | null;
  name: string | null;
  memory: { total_bytes: number | null; peak_bytes: number | null; peak_source: string | null };
  busy: { gaps: Gap[]; num_gaps: number; start_up_s: number; working: object | null } | null;
  power: { limit_w: number | null };
  shared_ratio: number | null;
}

export interface Report {
  run: string;
  command: string[];
  started_at: number;
  lasted_s: number;
  halts: Halt[];
  findings: Finding[];
  gpus: Gpu[];
  phases: Phase[];
  num_phases: number;
  marks: Mark[];
  num_marks: number;
}

/** Points by time; where nothing was seen, one without values. */
export interface Series {
  times: number[];
  low: (number | null)[];
  mean: (number | null)[];
  high: (number | null)[];
}

/** One GPU of the report, in words and to draw. */
export interface GpuPage {
  peak: string;
  peak_note: string;
  busy: string;
  busy_note: string;
  power: string;
  idle: string;
  memory_series: Series;
  busy_series: Series;
  power_series: Series;
}

export interface ReportPage {
  version: string;
  report: Report;
  words: {
    title: string;
    circumstances: string;
    whose: string[];
    steps: string[];
    host: string;
  };
  gpus: GpuPage[];
  steps: { rank: number; step_series: Series; wait_series: Series }[];
  cpu: Series;
}
