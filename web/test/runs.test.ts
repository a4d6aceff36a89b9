import assert from "node:assert/strict";
import test from "node:test";
import type { RunFigures, RunLine } from "../src/live_data";
import { MOST_OVERLAID, differences, overlaid } from "../src/overlaid";
import type { ReportPage } from "../src/report_data";
import { isSortKey, sorted } from "../src/run_sort";

const run = (id: string, started_at: number, duration_s: number): RunLine =>
  ({ id, started_at, duration_s }) as RunLine;
const figures = (peak_bytes: number | null, busy_ratio: number | null): RunFigures => ({
  peak_bytes,
  total_bytes: null,
  busy_ratio,
});
const RUNS = [run("a", 30, 5), run("b", 20, 50), run("c", 10, 20)];
const KNOWN = { a: figures(2, 0.1), b: figures(null, 0.9), c: figures(3, null) };
const names = (by: "started" | "lasted" | "peak" | "active", isUp: boolean): string =>
  sorted(RUNS, KNOWN, by, isUp)
    .map(({ id }) => id)
    .join("");

test("runs are sorted by a figure, and what is unknown is last in either direction", () => {
  assert.equal(names("started", false), "abc");
  assert.equal(names("started", true), "cba");
  assert.equal(names("lasted", false), "bca");
  assert.equal(names("peak", false), "cab");
  assert.equal(names("peak", true), "acb");
  assert.equal(names("active", false), "bac");
  assert.equal(sorted(RUNS, {}, "peak", false).map(({ id }) => id).join(""), "abc");
});

test("only a column that can be sorted by is taken from an address", () => {
  assert.ok(isSortKey("peak"));
  assert.ok(!isSortKey("constructor"));
  assert.ok(!isSortKey(null));
});

test("runs laid over each other have letters, colours and the fullest of their GPUs", () => {
  const gpus = [1, 5, null].map((peak_bytes) => ({ memory: { peak_bytes } }));
  const page = { report: { gpus }, gpus: [{}, { peak: "5" }, {}], steps: [] } as unknown as ReportPage;
  const found = overlaid(Array.from({ length: 9 }, () => page));
  assert.equal(found.length, MOST_OVERLAID);
  assert.deepEqual([found[1]?.name, found[1]?.colour], ["B", "run-2"]);
  assert.equal(found[0]?.page?.peak, "5");
});

test("what differs between commands is what not all of them have", () => {
  const commands = [
    ["python", "train.py", "--lr=1"],
    ["python", "train.py", "--lr=2", "--fp16"],
  ];
  assert.deepEqual(differences(commands), ["--lr=1", "--lr=2 --fp16"]);
});
