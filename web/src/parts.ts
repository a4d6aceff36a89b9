// The smaller parts of the page: a plan on its four axes, its code, caveats and what was not considered.

import type { Plan, Plans } from "./data";
import { h } from "./dom";
import { fold, pairs, tile } from "./frame";
import { glyph } from "./scatter";
import { STABILITIES, bytes, resources, room, seconds, times } from "./words";

/** The chosen plan on the four axes. */
export function tilesOf(plan: Plan): HTMLElement[] {
  const { prediction, relative_time } = plan;
  const [gpus, ...more] = resources(plan);
  const step =
    prediction.step_s === null
      ? ""
      : `about ${seconds(prediction.step_s)} a step, an estimate from the datasheet`;
  return [
    tile(
      "Stability",
      h("span", { class: "stability" }, glyph(plan.stability), STABILITIES[plan.stability].short),
      STABILITIES[plan.stability].long,
    ),
    tile(
      "Memory",
      bytes(prediction.device_bytes),
      `${room(prediction)}; the error bar ends at ${bytes(prediction.high_bytes)}`,
      retries(plan),
    ),
    tile("Resources", gpus ?? "", more.join(", ") || "nothing else"),
    tile(
      "Time",
      relative_time === null ? "not known" : `${times(relative_time)} the recommended plan`,
      step,
    ),
  ];
}

const retries = (plan: Plan): string =>
  plan.prediction.num_retries ? `${plan.prediction.num_retries} allocator retries a run: slow` : "";

/** What the plan changes, trick by trick, and the code as a whole. */
export function codeOf(plan: Plan, place: number): HTMLElement[] {
  const tricks = plan.tricks.map((trick) =>
    h(
      "li",
      {},
      h("p", {}, glyph(trick.stability), h("b", {}, trick.name), ` ${trick.what}`),
      trick.caveat && h("p", { class: "rest" }, trick.caveat),
      trick.code && h("code", { class: "line" }, trick.code),
    ),
  );
  const whole = plan.code.trim() ? [copyable(plan.code, `Code of plan ${place + 1}`)] : [];
  return [
    tricks.length
      ? h("ul", { class: "tricks" }, ...tricks)
      : h("p", { class: "note" }, "Nothing to change: train as before."),
    ...whole,
  ];
}

/** Code or a command in a box, with a button that copies it. */
export function copyable(text: string, label: string): HTMLElement {
  const told = h("span", { class: "unseen", role: "status" });
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  const code = h("pre", { tabindex: 0, "aria-label": label }, h("code", {}, text));
  let waiting = 0;
  button.addEventListener("click", () => {
    void copy(text, code).then((is) => {
      button.textContent = is ? "Copied" : "Press Ctrl+C";
      told.textContent = is ? "The code is on the clipboard" : "The code is selected";
      clearTimeout(waiting);
      waiting = window.setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  });
  return h(
    "div",
    { class: "copyable" },
    h("div", { class: "copy-bar" }, h("span", {}, label), button, told),
    code,
  );
}

/** To the clipboard; where the browser refuses, the text is selected for the user to copy. */
async function copy(text: string, shown: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(shown);
    return false;
  }
}

export const caveatsOf = (data: Plans): HTMLElement =>
  h("ul", {}, ...data.caveats.map((text) => h("li", {}, text)));

/** What was not considered, and what the prediction rests on. */
export function listsOf(data: Plans, plan: Plan | null): HTMLElement[] {
  const prediction = plan?.prediction ?? data.as_is;
  const unknowns = (prediction?.unknowns ?? []).map(
    ({ what, low_bytes, high_bytes, settled_by }): [string, string] => [
      what,
      `${signed(low_bytes)} to ${signed(high_bytes)}; measure it with ${settled_by}`,
    ],
  );
  const assumed = (prediction?.notes ?? []).map((note): [string, string] => [note, ""]);
  const modules = Object.entries(prediction?.by_module ?? {}).slice(0, 8);
  return [
    h(
      "div",
      { class: "folds" },
      data.rejected.length
        ? fold(
            `Not considered (${data.rejected.length})`,
            pairs(data.rejected.map(({ what, why }) => [what, why])),
          )
        : null,
      modules.length
        ? fold(
            "Largest modules at the peak",
            pairs(modules.map(([name, size]) => [name || "the model itself", bytes(size)])),
          )
        : null,
      unknowns.length ? fold("What the error bar is made of", pairs(unknowns)) : null,
      assumed.length ? fold("What was assumed", pairs(assumed)) : null,
    ),
  ];
}

const signed = (size: number): string =>
  size > 0 ? bytes(size) : size < 0 ? `−${bytes(-size)}` : "0";
