// What the page is given: the records of oomph (src/oomph/records), as JSON, with each plan its
// timeline and its code (src/oomph/showing/plan.py).

export type Stability = "same" | "rounding" | "changes";
export type Verdict = "yes" | "no" | "uncertain";

export interface Variant {
  micro_batch: number;
  accumulation: number;
  num_gpus: number;
  precision: string;
  checkpointing: string;
  offload_activations?: boolean;
  offload_optimizer?: boolean;
  sharding?: string;
  is_own_batch?: boolean; // of a script, whose size nobody knows
}

export interface Unknown {
  what: string;
  low_bytes: number;
  high_bytes: number;
  settled_by: string;
}

export interface Prediction {
  gpu: string;
  variant: Variant;
  allocated_bytes: number;
  reserved_bytes: number;
  device_bytes: number;
  low_bytes: number;
  high_bytes: number;
  capacity_bytes: number;
  fits: Verdict;
  num_retries: number;
  host_bytes?: number | null; // of the host's memory, beside the data loader's
  by_category: Record<string, number>;
  by_module: Record<string, number>;
  peak_at: { step: number; phase: string; op: string; module: string };
  step_s: number | null;
  samples_per_s: number | null;
  unknowns: Unknown[];
  notes: string[];
}

export interface Trick {
  name: string;
  what: string;
  stability: Stability;
  caveat: string | null;
  code: string;
}

export interface Timeline {
  positions: number[];
  categories: string[];
  live_bytes: number[][];
  phases: [number, string][];
  ops: number[];
  op_names: string[];
}

export interface Plan {
  variant: Variant;
  prediction: Prediction;
  tricks: Trick[];
  stability: Stability;
  relative_time: number | null;
  recommended: boolean;
  why: string;
  timeline: Timeline | null;
  code: string;
}

export interface Plans {
  version: string;
  workload: string;
  gpu: string;
  batch_size: number;
  is_own_batch?: boolean;
  capacity_bytes: number;
  fits_as_is: Verdict | null; // null, as the next: a single plan does not know
  as_is: Prediction | null;
  plans: Plan[];
  rejected: { what: string; why: string }[];
  shortfall: {
    missing_bytes: number;
    largest_part: string;
    smallest_gpu: string | null;
    num_gpus: number | null;
  } | null;
  offers?: { allow: string; price: string; device_bytes: number; fits: Verdict }[];
  caveats: string[];
  num_candidates: number | null;
}
