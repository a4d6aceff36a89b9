import assert from "node:assert/strict";
import test from "node:test";
import type { Frame, History, LiveGpu, LiveProcess } from "../src/live_data";
import { extended, memoryParts, partOf, summary, together, whoseIs } from "../src/live_words";

const GIB = 2 ** 30;

const process = (owner: LiveProcess["owner"], kind: LiveProcess["kind"] = "compute"): LiveProcess => ({
  pid: 1,
  owner,
  user: "ada",
  command: "train.py",
  is_hidden: false,
  used_bytes: GIB,
  started_at: 0,
  kind,
  note: null,
  job: null,
});

const gpu = (more: Partial<LiveGpu> = {}): LiveGpu => ({
  index: 0,
  uuid: "GPU-0",
  name: "A100",
  is_slice: false,
  slice: null,
  is_free: true,
  problem: null,
  total_bytes: 80 * GIB,
  used_bytes: 0,
  held_bytes: {},
  busy_ratio: 0.5,
  busy_source: "buffered",
  sm_active_ratio: null,
  power_w: 100,
  power_limit_w: 400,
  temperature_c: 40,
  throttled_by: [],
  processes: [],
  ...more,
});

const frame = (...gpus: LiveGpu[]): Frame => ({ number: 0, at: 100, problem: null, notes: [], gpus });
const taken = (...owners: LiveProcess["owner"][]): LiveGpu =>
  gpu({ is_free: false, processes: owners.map((owner) => process(owner)) });

test("a GPU is of those who compute on it", () => {
  assert.equal(whoseIs(gpu()), "free");
  assert.equal(whoseIs(taken("mine")), "mine");
  assert.equal(whoseIs(taken("others")), "others");
  assert.equal(whoseIs(taken("mine", "others")), "shared");
  assert.equal(whoseIs(taken("unknown")), "unknown");
  assert.equal(whoseIs(gpu({ is_free: null })), "unknown");
  assert.equal(whoseIs(gpu({ used_bytes: null, processes: null })), "lost");
});

test("a display server makes a GPU nobody's", () => {
  assert.equal(whoseIs(gpu({ processes: [process("others", "graphics")] })), "free");
});

test("the summary counts, free ones first", () => {
  assert.equal(summary(frame()), "There is no GPU here");
  assert.equal(summary({ ...frame(), problem: "no driver" }), "No GPU can be read");
  assert.equal(summary(frame(gpu())), "The GPU is free");
  assert.equal(summary(frame(gpu(), gpu())), "All 2 GPUs are free");
  assert.equal(summary(frame(taken("mine"), gpu())), "1 of 2 GPUs is free; 1 yours");
  assert.equal(summary(frame(taken("mine"), taken("others"))), "None of 2 GPUs is free; 1 yours, 1 others’");
});

test("a process is told by its rank and its launcher", () => {
  const job = { run: null, rank: 1, world_size: 4, launcher: "torchrun" };
  assert.equal(partOf(job), "rank 1 of 4, by torchrun");
  assert.equal(partOf({ ...job, rank: null }), "by torchrun");
  assert.equal(partOf({ ...job, launcher: null, world_size: null }), "rank 1");
});

test("sums are of what is known", () => {
  const lost = gpu({ used_bytes: null, power_w: null });
  assert.equal(together(frame(gpu({ used_bytes: 20 * GIB }), lost)), "20.0 GiB of 80.0 GiB in use, 100 W");
  assert.equal(together(frame(lost)), "");
  assert.equal(together(frame(gpu({ power_w: 1234 }))), "0 B of 80.0 GiB in use, 1.23 kW");
});

test("the parts of a bar never are more than what is used", () => {
  const parts = memoryParts(gpu({ used_bytes: 40 * GIB, held_bytes: { mine: 60 * GIB, others: GIB } }));
  assert.deepEqual(parts, [{ whose: "mine", share: 0.5 }]);
  const some = memoryParts(gpu({ used_bytes: 40 * GIB, held_bytes: { mine: 20 * GIB } }));
  assert.deepEqual(some.map(({ whose }) => whose), ["mine", "nobody"]);
  assert.deepEqual(memoryParts(gpu({ used_bytes: null })), []);
});

const past = (times: number[]): History => ({
  host: "node7",
  user: null,
  version: "1",
  times,
  gpus: [{ used_bytes: times.map(() => 1), busy_ratio: times.map(() => 0.1), power_w: times.map(() => 2) }],
});

test("a second is added at the end, and what is too old goes", () => {
  const after = extended(past([98, 99]), frame(gpu()), 2);
  assert.deepEqual(after.times, [99, 100]);
  assert.deepEqual(after.gpus[0]?.busy_ratio, [0.1, 0.5]);
});

test("seconds that were missed are a break in the line", () => {
  const after = extended(past([90]), frame(gpu()), 900);
  assert.deepEqual(after.times, [90, 91, 100]);
  assert.deepEqual(after.gpus[0]?.busy_ratio, [0.1, null, 0.5]);
});

test("a second that is there already is not added again", () => {
  const before = past([99, 100]);
  assert.equal(extended(before, frame(gpu()), 900), before);
});

test("a clock that was set back begins anew", () => {
  const after = extended(past([500, 501]), frame(gpu()), 900);
  assert.deepEqual(after.times, [100]);
  assert.deepEqual(after.gpus[0]?.busy_ratio, [0.5]);
});

test("a GPU that is new has an empty past", () => {
  const after = extended(past([99]), frame(gpu(), gpu({ index: 1 })), 900);
  assert.deepEqual(after.gpus[1]?.used_bytes, [null, 0]);
});
