import assert from "node:assert/strict";
import test from "node:test";
import { front, span, ticks } from "../src/front";

test("the front has those that none beats on both axes", () => {
  const points = [
    { x: 2, y: 2 },
    { x: 1, y: 5 },
    { x: 3, y: 3 },
    { x: 4, y: 1 },
    { x: 1, y: 6 },
  ];
  assert.deepEqual(front(points), [1, 0, 3]);
  assert.deepEqual(front([]), []);
});

test("marks of an axis are round and inside it", () => {
  assert.deepEqual(ticks(0.62, 3.45, 5), [1, 2, 3]);
  assert.deepEqual(ticks(0, 16, 5), [0, 5, 10, 15]);
  assert.deepEqual(ticks(0.98, 1.06, 4), [0.98, 1, 1.02, 1.04, 1.06]);
  assert.deepEqual(ticks(1, 1, 4), [1]);
});

test("an axis has an extent even for a single plan", () => {
  const [low, high] = span([2]);
  assert.ok(low < 2 && high > 2 && low >= 0);
  const [zero, some] = span([0]);
  assert.ok(zero === 0 && some > 0);
});
