// Records -> words. Pure: no document is needed.

import type { Plan, Plans, Prediction, Stability, Verdict } from "./data";

const GIB = 2 ** 30;
const UNITS: [number, string][] = [
  [2 ** 40, "TiB"],
  [GIB, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];

/** As oomph.units.format_bytes writes it. */
export function bytes(size: number): string {
  for (const [unit, name] of UNITS) {
    if (Math.abs(size) >= unit) return `${(size / unit).toFixed(1)} ${name}`;
  }
  return `${size} B`;
}

export const gib = (size: number): string => (size / GIB).toFixed(1);
export const toGib = (size: number): number => size / GIB;

/** Three figures, no exponent: "0.0421 s", "1.39 s", "2 min 5 s". */
export function seconds(time: number): string {
  const whole = Math.round(time);
  if (time >= 59.95) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Number(time.toPrecision(3))} s`;
}

export const times = (ratio: number): string => `${ratio.toFixed(2)}×`;

const FITS: Record<Verdict, string> = {
  yes: "Fits on",
  uncertain: "May or may not fit on",
  no: "Does not fit on",
};

export const VERDICTS: Record<Verdict, string> = {
  yes: "fits",
  uncertain: "may not fit",
  no: "does not fit",
};

export const STABILITIES: Record<Stability, { short: string; long: string }> = {
  same: { short: "same update", long: "Exactly the same update as without the tricks." },
  rounding: {
    short: "same within rounding",
    long: "The same update within rounding; worth a check on your model.",
  },
  changes: { short: "changes training", long: "Changes training: used only if you allow it." },
};

/** What is recomputed, in words; null if nothing is. */
export function recomputed(checkpointing: string): string | null {
  if (checkpointing === "none") return null;
  if (checkpointing === "blocks") return "every block recomputed";
  if (checkpointing === "selective") return "cheap operations recomputed";
  const every = /^every-(\d+)$/.exec(checkpointing);
  if (every) return `every ${ordinal(Number(every[1]))} block recomputed`;
  const listed = /^blocks:(.+)$/.exec(checkpointing);
  if (listed) {
    const sizes = listed[1]!.split(",").map((part) => {
      const [first, last] = part.split("-").map(Number);
      return (last ?? first!) - first! + 1;
    });
    const count = sizes.reduce((sum, size) => sum + size, 0);
    return `${count} ${count === 1 ? "block" : "blocks"} recomputed`;
  }
  return `recomputed: ${checkpointing}`;
}

function ordinal(number: number): string {
  if (number === 2) return "second";
  if (number === 3) return "third";
  return `${number}th`;
}

/** The split of the batch, the precision, and the tricks by their names. */
export function settings(plan: Plan): string[] {
  const variant = plan.variant;
  const split = `micro-batch ${variant.micro_batch} × ${variant.accumulation}`;
  const words = [variant.is_own_batch ? "the script's own batch" : split];
  if (variant.num_gpus > 1) words[0] += ` on ${variant.num_gpus} GPUs`;
  words.push(variant.precision);
  const others = plan.tricks.filter(({ name }) => name !== "accumulation" && name !== variant.precision);
  return words.concat(
    others.map(({ name }) => (name === "checkpointing" ? recomputed(variant.checkpointing) : null) ?? name),
  );
}

/** "13.9 of 15.8 GiB" */
export const share = (prediction: Prediction): string =>
  `${gib(prediction.device_bytes)} of ${bytes(prediction.capacity_bytes)}`;

/** The plans with each time as a ratio of the recommended plan's, as on the terminal. */
export function againstTheFirst(plans: Plans): Plans {
  const reference = plans.plans[0]?.relative_time ?? null;
  const ratio = (time: number | null): number | null =>
    time === null || !reference ? null : time / reference;
  return {
    ...plans,
    plans: plans.plans.map((plan) => ({ ...plan, relative_time: ratio(plan.relative_time) })),
  };
}

/** The answer in one sentence. */
export function headline(plans: Plans, plan: Plan | null): string {
  if (!plan) {
    const missing = plans.shortfall ? `: ${bytes(plans.shortfall.missing_bytes)} are missing` : "";
    return `Nothing fits on ${plans.gpu}${missing}`;
  }
  const isOther = plan.relative_time !== null && !plan.recommended;
  const time = isOther ? `, ${times(plan.relative_time ?? 1)} the time of the recommended plan` : "";
  const told = settings(plan).join(", ");
  return `${FITS[plan.prediction.fits]} ${plans.gpu}: ${told}. ${share(plan.prediction)}${time}.`;
}

/** What would help where nothing fits. */
export function wayOut(plans: Plans): string {
  const short = plans.shortfall;
  if (!short) return "";
  const offers = (plans.offers ?? []).map(
    ({ allow, device_bytes, fits }) =>
      ` With --allow ${allow}: ${bytes(device_bytes)}${fits === "yes" ? ", which fits" : ""}.`,
  );
  const ways = [
    short.smallest_gpu ? `on one ${short.smallest_gpu}` : "",
    short.num_gpus ? `sharded over ${short.num_gpus} × ${plans.gpu}` : "",
  ].filter(Boolean);
  const would = ways.length ? ` It would fit ${ways.join(", or ")}.` : "";
  return `The largest single part is ${short.largest_part}.${would}${offers.join("")}`;
}

/** How the workload does without any change. */
export function asGiven(plans: Plans): string {
  if (!plans.as_is) return "";
  const batch = plans.is_own_batch ? "its own batch" : `all ${plans.batch_size} examples`;
  const told = `${share(plans.as_is)}, ${batch} at once`;
  if (plans.fits_as_is === "yes") return `It already fits as given: ${told}.`;
  return `As given it ${plans.fits_as_is === "no" ? "does not fit" : "may not fit"}: ${told}.`;
}

/** GPUs, and what else of the machine a plan uses. */
export function resources(plan: Plan): string[] {
  const { num_gpus, sharding, offload_activations, offload_optimizer } = plan.variant;
  const { host_bytes } = plan.prediction;
  const words = [`${num_gpus} ${num_gpus === 1 ? "GPU" : "GPUs"}`];
  if (host_bytes) words.push(`${bytes(host_bytes)} of host memory`);
  if (offload_activations) words.push("activations over PCIe");
  if (offload_optimizer) words.push("optimizer on the host");
  const isSharded = sharding === "fsdp" || sharding === "hybrid";
  if (num_gpus > 1) words.push(`${isSharded ? "parameters and " : ""}gradients between GPUs`);
  return words;
}

/** An op as torch's users know it: "aten.mm.default in blocks.3" is "mm in blocks.3". */
export const plainOp = (op: string): string =>
  op.replace(/^aten(?:\.|::)(\w+)(?:\.default)?(?= |$)/, "$1");

/** Memory that is left, or that is missing. */
export function room(prediction: Prediction): string {
  const free = prediction.capacity_bytes - prediction.device_bytes;
  return free >= 0 ? `${bytes(free)} left` : `${bytes(-free)} too much`;
}
