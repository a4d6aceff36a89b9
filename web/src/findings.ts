// What was concluded: each finding with its evidence, how sure it is, and what to do.

import { h, svg } from "./dom";
import type { Finding } from "./report_data";
import { CONFIDENCES, type Tone, toneOf } from "./report_words";

/** Told apart by shape as well as by colour. */
const SHAPES: Record<Tone, string> = {
  bad: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM8 4v5M8 11v1.5",
  good: "M8 1a7 7 0 1 0 .01 0zM4.8 8.2l2.2 2.3L11.3 6",
  look: "M8 1.5L15 14H1zM8 6v4M8 11.2v1.2",
  plain: "M8 1a7 7 0 1 0 .01 0zM8 7v4.5M8 4.2v1.2",
};

const mark = (tone: Tone): SVGElement =>
  svg(
    "svg",
    { class: `tone ${tone}`, viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", { d: SHAPES[tone] }),
  );

/** Out of memory or not first, as the report has them; `whose` are their GPUs in words. */
export const findingsOf = (findings: Finding[], whose: string[]): HTMLElement[] =>
  findings.map((finding, place) => oneOf(finding, whose[place] ?? ""));

function oneOf(finding: Finding, whose: string): HTMLElement {
  const tone = toneOf(finding.kind);
  return h(
    "li",
    { class: `finding ${tone}`, "data-kind": finding.kind },
    mark(tone),
    h(
      "div",
      {},
      h(
        "p",
        { class: "verdict" },
        whose && h("b", { class: "whose" }, whose),
        h("b", {}, capital(finding.sentence)),
        " ",
        h(
          "span",
          { class: `confidence ${finding.confidence}`, title: CONFIDENCES[finding.confidence] ?? "" },
          finding.confidence,
        ),
      ),
      finding.evidence.length
        ? h("ul", { class: "evidence" }, ...finding.evidence.map((text) => h("li", {}, text)))
        : null,
      finding.advice.length
        ? h("ul", { class: "advice" }, ...finding.advice.map((text) => h("li", {}, text)))
        : null,
    ),
  );
}

export const capital = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);
