// What every page is put together from: sections, figures, lists, folds; and how it prints.

import { h, svg } from "./dom";

/** A part of the page under a title of its own. */
export const section = (title: string, ...children: Node[]): HTMLElement => {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...children);
};

/** One figure, with what it means. */
export const tile = (name: string, value: Node | string, detail: string, warning = ""): HTMLElement =>
  h(
    "div",
    { class: "tile" },
    h("h3", {}, name),
    h("p", { class: "value" }, value),
    h("p", { class: "rest" }, detail),
    warning && h("p", { class: "warning" }, warning),
  );

/** Words, each with what is said of it. */
export const pairs = (items: [string, string][]): HTMLElement =>
  h("dl", {}, ...items.flatMap(([what, why]) => [h("dt", {}, what), h("dd", {}, why)]));

/** What is there for those who ask. */
export const fold = (title: string, content: HTMLElement): HTMLElement =>
  h("details", {}, h("summary", {}, chevron(), title), content);

const chevron = (): SVGElement =>
  svg(
    "svg",
    { class: "chevron", viewBox: "0 0 12 12", "aria-hidden": "true" },
    svg("path", { d: "M4 2L8 6L4 10" }),
  );

/** Along the row only: the page itself stays where the reader has it. */
export function bringIntoSight(pill: HTMLElement | undefined): void {
  const row = pill?.parentElement;
  if (!pill || !row) return;
  const air = 24;
  if (pill.offsetLeft - air < row.scrollLeft) row.scrollLeft = pill.offsetLeft - air;
  const end = pill.offsetLeft + pill.offsetWidth + air - row.clientWidth;
  if (end > row.scrollLeft) row.scrollLeft = end;
}

/** Paper is light, has no buttons, and opens nothing. */
export function printWell(redraw: () => void, signal?: AbortSignal): void {
  const opened: HTMLDetailsElement[] = [];
  addEventListener("beforeprint", () => {
    document.documentElement.dataset["paper"] = "";
    for (const details of document.querySelectorAll<HTMLDetailsElement>("details:not([open])")) {
      details.open = true;
      opened.push(details);
    }
    redraw();
  }, { signal });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset["paper"];
    for (const details of opened.splice(0)) details.open = false;
    redraw();
  }, { signal });
}
