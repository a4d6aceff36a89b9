import assert from "node:assert/strict";
import test from "node:test";
import type { Plan, Plans, Prediction, Trick, Variant } from "../src/data";
import {
  asGiven,
  bytes,
  headline,
  plainOp,
  recomputed,
  resources,
  room,
  seconds,
  settings,
  againstTheFirst,
  wayOut,
} from "../src/words";

const GIB = 2 ** 30;

const variant: Variant = {
  micro_batch: 8,
  accumulation: 8,
  num_gpus: 1,
  precision: "fp16",
  checkpointing: "none",
};
const prediction = {
  device_bytes: 13.9 * GIB,
  capacity_bytes: 15.8 * GIB,
  fits: "yes",
} as Prediction;
const named = (...names: string[]) => names.map((name) => ({ name }) as Trick);
const plan = {
  variant,
  prediction,
  relative_time: 1.2,
  tricks: named("accumulation", "fp16"),
} as Plan;
const plans = {
  gpu: "v100-16gb",
  batch_size: 64,
  fits_as_is: "no",
  as_is: { ...prediction, device_bytes: 101 * GIB },
} as Plans;

test("the headline is the answer in a sentence", () => {
  assert.equal(
    headline(plans, plan),
    "Fits on v100-16gb: micro-batch 8 × 8, fp16. 13.9 of 15.8 GiB, 1.20× the time of the recommended plan.",
  );
});

test("the recommended plan is the 1.00 of every time", () => {
  const every = [1.2, 2.4, null].map((relative_time) => ({ ...plan, relative_time }));
  const found = againstTheFirst({ ...plans, plans: every }).plans;
  assert.deepEqual(
    found.map(({ relative_time }) => relative_time),
    [1, 2, null],
  );
  assert.ok(!headline(plans, { ...plan, recommended: true }).includes("time"));
});

test("where nothing fits it says what consent would give", () => {
  const offers = [{ allow: "qlora", price: "", device_bytes: 8 * GIB, fits: "yes" as const }];
  const shortfall = { missing_bytes: GIB, largest_part: "a", smallest_gpu: null, num_gpus: null };
  assert.match(wayOut({ ...plans, shortfall, offers }), /With --allow qlora: 8.0 GiB, which fits/);
});

test("a time that nobody knows is not told", () => {
  assert.ok(!headline(plans, { ...plan, relative_time: null }).includes("time"));
});

test("what fits only at the best of what is unknown is not said to fit", () => {
  const unsure = { ...plan, prediction: { ...prediction, fits: "uncertain" as const } };
  assert.match(headline(plans, unsure), /^May or may not fit on/);
});

test("where nothing fits it says by how much, and what would do", () => {
  const short = {
    missing_bytes: 3 * GIB,
    largest_part: "optimizer 12.4 GiB",
    smallest_gpu: "a100-40gb",
    num_gpus: 2,
  };
  const none = { ...plans, shortfall: short };
  assert.equal(headline(none, null), "Nothing fits on v100-16gb: 3.0 GiB are missing");
  assert.equal(
    wayOut(none),
    "The largest single part is optimizer 12.4 GiB. It would fit on one a100-40gb, or sharded over 2 × v100-16gb.",
  );
});

test("the workload as given is told first if it fits", () => {
  assert.equal(
    asGiven(plans),
    "As given it does not fit: 101.0 of 15.8 GiB, all 64 examples at once.",
  );
  assert.match(asGiven({ ...plans, fits_as_is: "yes" }), /^It already fits as given/);
});

test("every way of recomputing has its words", () => {
  const told = [
    "none",
    "blocks",
    "every-2",
    "every-4",
    "selective",
    "blocks:3",
    "blocks:0,4,5",
    "blocks:0-3,6",
    "new",
  ].map(recomputed);
  assert.deepEqual(told, [
    null,
    "every block recomputed",
    "every second block recomputed",
    "every 4th block recomputed",
    "cheap operations recomputed",
    "1 block recomputed",
    "3 blocks recomputed",
    "5 blocks recomputed",
    "recomputed: new",
  ]);
});

test("a plan is named by its split, its precision and its tricks", () => {
  assert.deepEqual(settings(plan), ["micro-batch 8 × 8", "fp16"]);
  const own = { ...plan, variant: { ...variant, is_own_batch: true } };
  assert.deepEqual(settings(own), ["the script's own batch", "fp16"]);
  const much = {
    ...plan,
    variant: { ...variant, num_gpus: 2, checkpointing: "every-2" },
    tricks: named("accumulation", "checkpointing", "fsdp", "fp16", "8-bit-optimizer"),
  };
  assert.deepEqual(settings(much), [
    "micro-batch 8 × 8 on 2 GPUs",
    "fp16",
    "every second block recomputed",
    "fsdp",
    "8-bit-optimizer",
  ]);
});

test("sizes and times are as a person writes them", () => {
  assert.deepEqual([0, 1500 * 2 ** 20, 24 * GIB].map(bytes), ["0 B", "1.5 GiB", "24.0 GiB"]);
  assert.deepEqual([0.04213, 1.386, 59.94, 125.2, 119.7].map(seconds), [
    "0.0421 s",
    "1.39 s",
    "59.9 s",
    "2 min 5 s",
    "2 min 0 s",
  ]);
  assert.equal(room({ ...prediction, device_bytes: 16.8 * GIB }), "1.0 GiB too much");
});

test("an op is named as torch's users know it", () => {
  const told = [
    "aten.mm.default in blocks.3",
    "aten::mm",
    "aten.add_.Tensor",
    "_foreach_sqrt in x",
    "",
  ].map(plainOp);
  assert.deepEqual(told, ["mm in blocks.3", "mm", "aten.add_.Tensor", "_foreach_sqrt in x", ""]);
});

test("resources are the GPUs, the host's memory and what goes between them", () => {
  assert.deepEqual(resources(plan), ["1 GPU"]);
  const much = {
    ...plan,
    variant: { ...variant, num_gpus: 2, sharding: "fsdp", offload_optimizer: true },
    prediction: { ...prediction, host_bytes: 3 * GIB },
  };
  assert.deepEqual(resources(much), [
    "2 GPUs",
    "3.0 GiB of host memory",
    "optimizer on the host",
    "parameters and gradients between GPUs",
  ]);
});
