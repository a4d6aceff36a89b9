import assert from "node:assert/strict";
import test from "node:test";
import type { Plan } from "../src/data";
import { layersAtPeak } from "../src/peak_chart";

test("the layers of a peak stand on the CUDA context, and what comes and goes is on top", () => {
  const GIB = 2 ** 30;
  const by_category = { temporaries: GIB, activations: 4 * GIB, made_up: GIB, parameters: 2 * GIB };
  const prediction = { device_bytes: 10 * GIB, reserved_bytes: 9 * GIB, by_category };
  const layers = layersAtPeak({ prediction } as unknown as Plan);
  assert.deepEqual(
    layers.map(({ name }) => name),
    ["CUDA context", "parameters", "activations", "temporaries", "made_up"],
  );
  assert.deepEqual(layers.map(({ tops }) => tops[0]), [1, 3, 7, 8, 9]);
});
