// What a server sends: the machine, second by second (src/oomph/showing/dashboard.py), and lists of
// runs and plans (src/oomph/verbs/serving.py).

export type Owner = "mine" | "others" | "unknown";

/** What a process is part of, as far as its ancestors and its environment tell. */
export interface Job {
  run: string | null; // of `oomph watch -- COMMAND`
  rank: number | null;
  world_size: number | null;
  launcher: string | null;
}

export interface LiveProcess {
  pid: number;
  owner: Owner;
  user: string | null;
  command: string | null;
  is_hidden: boolean; // there is a command line, and it is not for this viewer
  used_bytes: number | null;
  started_at: number | null;
  kind: "compute" | "graphics";
  note: string | null;
  job: Job | null;
}

export interface LiveGpu {
  index: number;
  uuid: string | null;
  name: string | null;
  is_slice: boolean;
  slice: number | null; // its number on its GPU
  is_free: boolean | null;
  problem: string | null;
  total_bytes: number | null;
  used_bytes: number | null;
  held_bytes: Partial<Record<Owner, number>> | null;
  busy_ratio: number | null;
  busy_source: string | null;
  sm_active_ratio: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  temperature_c: number | null;
  throttled_by: string[];
  processes: LiveProcess[] | null; // null: the list could not be read
}

export interface Frame {
  number: number;
  at: number; // seconds since the epoch
  problem: string | null;
  notes: string[]; // what cannot be watched
  gpus: LiveGpu[];
}

type Column = (number | null)[];

export interface Past {
  used_bytes: Column;
  busy_ratio: Column;
  power_w: Column;
}

export interface History {
  host: string;
  user: string | null;
  version: string;
  times: number[];
  gpus: Past[];
}

export interface RunLine {
  id: string;
  command: string[];
  host: string;
  user: string | null;
  started_at: number;
  duration_s: number;
  state: "running" | "ended" | "unknown";
  exit_code: number | null;
  out_of_memory: string | null;
  how: string;
}

/** What runs are sorted by; null where it is not known. */
export interface RunFigures {
  peak_bytes: number | null;
  total_bytes: number | null;
  busy_ratio: number | null;
}

export interface PlanLine {
  name: string;
  written_at: number;
  workload: string;
  gpu: string;
  batch_size: number;
  num_plans: number;
  device_bytes: number | null;
  capacity_bytes: number;
  why: string | null;
}
