import assert from "node:assert/strict";
import test from "node:test";
import { type Recording, chosen, momentAt, placeOf, rangeOf, resolutionOf, totalsOf, within } from "../src/recording_chart";
import { WHOLE } from "../src/zoom";

const MIB = 2 ** 20;

/** As many events, each one a point; one far above the others, one far below, one reserved. */
function recording(num: number, [high, low, most]: [number, number, number]): Recording {
  const events = Array.from({ length: num }, (_, i) => i);
  return {
    categories: ["activations", "optimizer"],
    events,
    live_bytes: [
      events.map((i) => (i === high ? 900 : i === low ? 0 : 100 + (i % 50)) * MIB),
      events.map((i) => (i === low ? 0 : 50) * MIB),
    ],
    reserved_bytes: events.map((i) => (i === most ? 2000 : 1000) * MIB),
    num_events: num,
  };
}

test("of tens of thousands of points, a drawing has a few for each column and every extreme", () => {
  for (let seed = 1; seed < 40; seed++) {
    const num = 50_000;
    const extremes = [7919, 104_729, 1_299_709].map((prime) => (prime * seed) % num) as [number, number, number];
    const made = recording(num, extremes);
    const points = chosen(made, totalsOf(made), WHOLE, 390);
    assert.ok(points.length <= 4 * 390);
    for (const point of extremes) assert.ok(points.includes(point), `${point} is not drawn`);
    assert.ok(points.every((point, i) => i === 0 || point > points[i - 1]!), "in their order, each once");
  }
});

test("zoomed in, each point is drawn, and the one that holds where the view begins", () => {
  const made = recording(50_000, [1, 2, 3]);
  const view = { from: placeOf(20_000.5, made), to: placeOf(20_040.5, made) };
  const points = chosen(made, totalsOf(made), view, 390);
  assert.equal(points[0], 20_000);
  assert.equal(points.length, 41);
  assert.deepEqual(within(made, view), [20_000, 20_041]);
});

test("an empty recording and one of a single event can be drawn", () => {
  const none: Recording = { categories: [], events: [], live_bytes: [], reserved_bytes: [], num_events: 0 };
  assert.ok(chosen(none, [], WHOLE, 390).length <= 1);
  assert.deepEqual(chosen(recording(1, [0, 0, 0]), [0], WHOLE, 390), [0]);
});

test("words say what is shown, and where the fullest moment of it is", () => {
  const made = recording(1000, [600, 2, 3]);
  assert.equal(rangeOf(made, totalsOf(made), WHOLE), "All 1,000 events; fullest at 600: 950.0 MiB");
  const view = { from: placeOf(400, made), to: placeOf(500, made) };
  assert.match(rangeOf(made, totalsOf(made), view), /^Events 400 to 500 of 1,000; fullest at 449: 199.0 MiB$/);
  assert.equal(
    momentAt(made, placeOf(600.5, made)),
    "Event 600: 950.0 MiB live (activations 900.0 MiB, optimizer 50.0 MiB), 1000.0 MiB reserved",
  );
  assert.match(momentAt(made, placeOf(3.2, made)), /^Event 3: .* 2.0 GiB reserved$/);
});

test("the page says how much of a recording it has", () => {
  const made = recording(1000, [1, 2, 3]);
  assert.equal(resolutionOf(made), "Each of the 1,000 recorded events is drawn.");
  assert.match(resolutionOf({ ...made, num_events: 80_000 }), /80,000 events, this page 1,000 of them: the fullest of every 80 or so/);
});
