import assert from "node:assert/strict";
import test from "node:test";
import { faint, nearest } from "../src/points";
import { clock, duration, percent, seconds, toneOf } from "../src/report_words";

test("durations are as Python writes them", () => {
  assert.equal(duration(42), "42 s");
  assert.equal(duration(3 * 3600 + 125), "3 h 2 min");
  assert.equal(duration(5 * 86400), "5 d");
});

test("the axis of time reads like a clock", () => {
  assert.equal(clock(7), "0:07");
  assert.equal(clock(125), "2:05");
  assert.equal(clock(3723), "1:02:03");
  assert.equal(clock(90061), "25:01:01");
});

test("figures have few digits", () => {
  assert.equal(percent(0.256), "26 %");
  assert.equal(seconds(0.0421), "42.1 ms");
  assert.equal(seconds(1.3888), "1.39 s");
});

test("the value at the cursor is that of the nearest point, and none where nothing was seen", () => {
  const series = { times: [1, 2, 10], low: [], mean: [5, null, 7], high: [] };
  assert.equal(nearest(series, 0), 5);
  assert.equal(nearest(series, 2.4), null);
  assert.equal(nearest(series, 99), 7);
  assert.equal(nearest({ times: [], low: [], mean: [], high: [] }, 1), null);
});

test("a colour gets thinner, and what is no colour stays", () => {
  assert.equal(faint("#1d5fd1", 0.2), "rgb(29 95 209 / 0.2)");
  assert.equal(faint("red", 0.2), "red");
});

test("a kind that this page does not know is something to look at", () => {
  assert.equal(toneOf("out-of-memory"), "bad");
  assert.equal(toneOf("hang"), "bad");
  assert.equal(toneOf("busy"), "good");
  assert.equal(toneOf("something new"), "look");
});
