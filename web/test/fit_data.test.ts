import assert from "node:assert/strict";
import test from "node:test";
import { linesOf, parameters, status } from "../src/fit_data";

test("parameters are counted as models are named", () => {
  assert.equal(parameters(124_439_808), "124 M");
  assert.equal(parameters(8_030_261_248), "8.03 B");
  assert.equal(parameters(405_853_388_800), "406 B");
});

test("lines are read whole, however the stream is cut", () => {
  const first = linesOf('{"kind":"asked","command":"oomph plan"}\n{"kind":"err');
  assert.deepEqual(first.lines, [{ kind: "asked", command: "oomph plan" }]);
  const second = linesOf(`${first.rest}or","what":"no","because":null,"try":null}\n`);
  assert.deepEqual(second.lines, [{ kind: "error", what: "no", because: null, try: null }]);
  assert.equal(second.rest, "");
});

test("a search says who comes first, and then what it does", () => {
  assert.equal(status({ kind: "waiting", num_ahead: 1, elapsed_s: 0 }), "Another search runs first");
  assert.equal(
    status({ kind: "waiting", num_ahead: 3, elapsed_s: 0 }),
    "3 other searches come first",
  );
  assert.equal(
    status({ kind: "progress", what: "rehearsing 1 of 5", elapsed_s: 2 }),
    "Rehearsing 1 of 5",
  );
});
