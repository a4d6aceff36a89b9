import assert from "node:assert/strict";
import test from "node:test";
import { WHOLE, moved, spanOf, viewAfter, zoomed } from "../src/zoom";

const LEAST = 1e-4;
const near = (found: number, wanted: number): void => assert.ok(Math.abs(found - wanted) < 1e-9, `${found}, not ${wanted}`);

test("what is under the pointer stays there while zooming", () => {
  let view = WHOLE;
  for (const factor of [0.5, 0.3, 0.9, 0.2, 2, 0.7]) {
    const [before, anchor] = [view, 0.3];
    view = zoomed(view, factor, anchor, LEAST);
    near(view.from + anchor * spanOf(view), before.from + anchor * spanOf(before));
  }
});

test("no view leaves the whole, is longer than it, or is shorter than the least", () => {
  let view = WHOLE;
  for (let i = 0; i < 2000; i++) {
    const [one, other] = [Math.abs(Math.sin(i * 7.7)), Math.abs(Math.sin(i * 3.1))];
    view = i % 3 ? zoomed(view, 0.2 + 2 * one, other, LEAST) : moved(view, 4 * one - 2);
    assert.ok(view.from >= 0 && view.to <= 1 + 1e-12 && spanOf(view) >= LEAST - 1e-12, JSON.stringify(view));
  }
});

test("keys zoom, move, and go back to the whole; others do nothing", () => {
  const half = { from: 0.25, to: 0.75 };
  assert.ok(spanOf(viewAfter("+", half, LEAST)!) < 0.5);
  assert.ok(spanOf(viewAfter("-", half, LEAST)!) > 0.5);
  near(viewAfter("ArrowLeft", half, LEAST)!.from, 0.15);
  near(viewAfter("ArrowRight", half, LEAST)!.from, 0.35);
  assert.equal(viewAfter("Home", half, LEAST)!.from, 0);
  assert.equal(viewAfter("End", half, LEAST)!.to, 1);
  for (const key of ["0", "Escape"]) assert.deepEqual(viewAfter(key, half, LEAST), WHOLE);
  for (const key of ["Tab", "a", "Enter", " "]) assert.equal(viewAfter(key, half, LEAST), null);
});

test("what is shorter than the closest view cannot be zoomed", () => {
  assert.deepEqual(zoomed(WHOLE, 0.1, 0.5, 12), WHOLE);
});
