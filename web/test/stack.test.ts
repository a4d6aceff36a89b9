import assert from "node:assert/strict";
import test from "node:test";
import type { Timeline } from "../src/data";
import { CONTEXT, inColumns, layersOf, peakOf, phaseAt, segmentsOf, spotFor } from "../src/stack";

const GIB = 2 ** 30;
const timeline: Timeline = {
  positions: [0, 0.5, 1],
  categories: ["parameters", "activations"],
  live_bytes: [
    [GIB, GIB, GIB],
    [0, 3 * GIB, GIB],
  ],
  phases: [],
  ops: [],
  op_names: [],
};

test("each layer lies on those before it, and the CUDA context below all", () => {
  const layers = layersOf(timeline, 2 * GIB);
  assert.deepEqual(
    layers.map(({ name }) => name),
    [CONTEXT, "parameters", "activations"],
  );
  assert.deepEqual(
    layers.map(({ tops }) => tops),
    [
      [2, 2, 2],
      [3, 3, 3],
      [3, 6, 4],
    ],
  );
  assert.equal(peakOf(layers), 1);
});

test("phases of a moment belong to the one after them, and the step has no holes", () => {
  const segments = segmentsOf([
    [0, "zero_grad"],
    [0.01, "input"],
    [0.02, "forward"],
    [0.4, "backward"],
    [0.9, "step"],
  ]);
  assert.deepEqual(segments, [
    { from: 0, to: 0.4, name: "forward" },
    { from: 0.4, to: 0.9, name: "backward" },
    { from: 0.9, to: 1, name: "step" },
  ]);
  const phases: [number, string][] = [
    [0, "forward"],
    [0.4, "backward"],
  ];
  assert.deepEqual(
    [0, 0.4, 0.41].map((at) => phaseAt(phases, at)),
    ["forward", "forward", "backward"],
  );
  assert.deepEqual(segmentsOf([]), []);
});

test("a name stands where its layer is thick over the whole of its width", () => {
  const positions = [0, 0.2, 0.4, 0.6, 0.8, 1];
  const bottoms = [0, 0, 0, 0, 0, 0];
  const spike = spotFor(bottoms, [9, 1, 4, 4, 4, 1], positions, 0.3);
  assert.ok(spike.x >= 0.55 && spike.x <= 0.65, String(spike.x)); // not at the spike of 9
  assert.equal(spike.room, 4);
  assert.equal(spike.y, 2);
});

test("in a layer of one height a name stands at the left, inside", () => {
  const spot = spotFor([1, 1, 1], [2, 2, 2], [0, 0.5, 1], 0.2);
  assert.deepEqual(spot, { x: 0.1, y: 1.5, room: 1 });
});

test("a peak of one moment is as wide as a column, and no other moment is higher than it was", () => {
  const spiky: Timeline = {
    positions: [0, 0.1, 0.301, 0.302, 0.9, 1],
    categories: ["activations"],
    live_bytes: [[1, 2, 9, 3, 5, 4]],
    phases: [],
    ops: [0, 1, 2, 1, 0, 1],
    op_names: ["", "mm", "softmax"],
  };
  const drawn = inColumns(spiky, 5);
  assert.deepEqual(drawn.positions, [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(drawn.moments, [0.1, 0.301, 0.4, 0.6, 0.9, 1]);
  assert.deepEqual(drawn.live_bytes, [[2, 9, 3, 3, 5, 5]]);
  assert.deepEqual(
    drawn.ops.map((op) => drawn.op_names[op]),
    ["mm", "softmax", "mm", "mm", "", ""],
  );
});
