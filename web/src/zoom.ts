// A stretch of something long, moved and zoomed by wheel, drag, pinch, keyboard and buttons.

import { h } from "./dom";

/** A part of the whole; both ends are 0..1. */
export interface View { from: number; to: number }

export const WHOLE: View = { from: 0, to: 1 };
export const spanOf = ({ from, to }: View): number => to - from;

/** The view that begins at `from`, moved so that it lies within the whole. */
function placed(from: number, span: number): View {
  const start = Math.min(Math.max(from, 0), 1 - span);
  return { from: start, to: start + span };
}

/** The view `factor` times as long; what is at `anchor`, 0..1 of the view, stays where it is. */
export function zoomed(view: View, factor: number, anchor: number, least: number): View {
  const before = spanOf(view);
  const span = Math.min(Math.max(before * factor, Math.min(least, 1)), 1);
  return span === 1 ? WHOLE : placed(view.from + anchor * (before - span), span);
}

/** The view moved by this share of its own length. */
export const moved = (view: View, share: number): View =>
  spanOf(view) === 1 ? WHOLE : placed(view.from + share * spanOf(view), spanOf(view));

const STEP = 0.6;
const SHARE = 0.2;
const SETTLED_MS = 250; // judgement: a page that scrolled more recently is still being scrolled

/** The view that a key asks for; null for a key that asks for none. */
export function viewAfter(key: string, view: View, least: number): View | null {
  switch (key) {
    case "+": case "=": return zoomed(view, STEP, 0.5, least);
    case "-": case "_": return zoomed(view, 1 / STEP, 0.5, least);
    case "ArrowLeft": return moved(view, -SHARE);
    case "ArrowRight": return moved(view, SHARE);
    case "Home": return moved(view, -1 / spanOf(view));
    case "End": return moved(view, 1 / spanOf(view));
    case "0": case "Escape": return WHOLE;
    default: return null;
  }
}

export interface Drawable {
  label: string; // what it is, for those who do not see it
  whole: string; // the words of the button that shows all
  least: number; // the shortest view
  draw(view: View, width: number): SVGSVGElement;
  range(view: View): string; // what the view shows, in words
  at(view: View, share: number): string; // what is at this place of the view
  shareAt?(x: number, y: number): number; // of the view; x and y are 0..1 of the drawing
  marks?: boolean; // whether the place of the pointer is marked
}

/** A drawing in its real width, with what moves and zooms it. */
export function zoomable(drawing: Drawable): HTMLElement {
  let view = WHOLE;
  const stage = h("div", {
    class: "stage",
    tabindex: "0",
    role: "group",
    "aria-label": `${drawing.label}. Plus and minus zoom, the arrow keys move, 0 shows all.`,
  });
  const picture = h("div");
  const cursor = h("i", { class: "cursor", "aria-hidden": "true", hidden: true });
  stage.append(picture, cursor);
  const range = h("span", { class: "range", "aria-live": "polite" });
  const reading = h("p", { class: "read", "aria-hidden": "true" });

  let [isDue, drawnWidth] = [false, 0];
  const draw = (): void => {
    isDue = false;
    drawnWidth = Math.max(stage.clientWidth, 200);
    picture.replaceChildren(drawing.draw(view, drawnWidth));
    range.textContent = drawing.range(view);
    const isWhole = spanOf(view) === 1;
    for (const one of [earlier, later, out, all]) one.setAttribute("aria-disabled", String(isWhole));
    stage.classList.toggle("is-zoomed", !isWhole);
  };
  const show = (wanted: View): void => {
    view = wanted;
    cursor.hidden = true;
    reading.textContent = "";
    if (!isDue) requestAnimationFrame(draw); // many events, one drawing for each frame
    isDue = true;
  };
  const button = (words: string, name: string, key: string): HTMLElement =>
    h("button", { type: "button", "aria-label": name, title: name, click: () => press(key) }, words);
  const press = (key: string): void => show(viewAfter(key, view, drawing.least) ?? view);
  const [earlier, later] = [button("‹", "move left", "ArrowLeft"), button("›", "move right", "ArrowRight")];
  const [out, inwards] = [button("−", "zoom out", "-"), button("+", "zoom in", "+")];
  const all = button(drawing.whole, drawing.whole, "0");

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
    const wanted = viewAfter(event.key, view, drawing.least);
    if (!wanted) return;
    event.preventDefault();
    show(wanted);
  });
  stage.addEventListener("dblclick", () => show(WHOLE));
  byPointer(stage, drawing, () => view, show, (event) => {
    const box = stage.getBoundingClientRect();
    const share = shareOf(drawing, box, event);
    if (share < 0 || share > 1) return;
    reading.textContent = drawing.at(view, share);
    cursor.hidden = !drawing.marks;
    cursor.style.setProperty("left", `${event.clientX - box.left}px`);
  });
  stage.addEventListener("pointerleave", () => { cursor.hidden = true; });
  new ResizeObserver(() => { if (stage.clientWidth && stage.clientWidth !== drawnWidth) draw(); }).observe(stage);
  draw();
  return h("div", { class: "zoomable" }, h("div", { class: "zoom" }, range, h("span", { class: "buttons" }, earlier, later, out, inwards, all)), stage, reading);
}

interface Point { clientX: number; clientY: number }

function shareOf({ shareAt }: Drawable, box: DOMRect, { clientX, clientY }: Point): number {
  const [x, y] = [(clientX - box.left) / (box.width || 1), (clientY - box.top) / (box.height || 1)];
  return shareAt ? shareAt(x, y) : x;
}

/** Wheel, drag and pinch; a finger that goes up or down scrolls the page, as anywhere. */
function byPointer(
  stage: HTMLElement, drawing: Drawable, get: () => View, show: (view: View) => void, tell: (at: Point) => void,
): void {
  const share = (at: Point): number => shareOf(drawing, stage.getBoundingClientRect(), at);
  let scrolled = -Infinity;
  addEventListener("scroll", (event) => { scrolled = event.timeStamp; }, { passive: true });
  stage.addEventListener("wheel", (event) => {
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const by = (isSideways ? event.deltaX || event.deltaY : event.deltaY) * unit;
    const wanted = isSideways
      ? moved(get(), by / 800)
      : zoomed(get(), Math.exp(Math.min(Math.max(by, -300), 300) / (event.ctrlKey ? 120 : 400)), share(event), drawing.least);
    // Whoever scrolls past the chart, or can zoom out no further, scrolls the page.
    const isPassing = !event.ctrlKey && event.timeStamp - scrolled < SETTLED_MS;
    if (isPassing || (spanOf(wanted) === 1 && spanOf(get()) === 1 && !event.ctrlKey)) return;
    event.preventDefault();
    show(wanted);
  }, { passive: false });

  const held = new Map<number, Point>();
  let start: { view: View; centre: number; apart: number } | null = null;
  const grip = (): { centre: number; apart: number } => {
    const points = [...held.values()];
    const xs = points.map((at) => at.clientX);
    return {
      centre: points.reduce((sum, at) => sum + share(at), 0) / (points.length || 1),
      apart: Math.max(Math.max(...xs) - Math.min(...xs), 24),
    };
  };
  const regrip = (): void => { start = held.size ? { view: get(), ...grip() } : null; };
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    stage.setPointerCapture(event.pointerId);
    held.set(event.pointerId, event);
    regrip();
    tell(event);
  });
  stage.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId) || !start) return tell(event);
    held.set(event.pointerId, event);
    const { centre, apart } = grip();
    if (held.size === 1 && Math.abs(centre - start.centre) < 0.004) return; // a tap is no drag
    const wanted = zoomed(start.view, held.size > 1 ? start.apart / apart : 1, start.centre, drawing.least);
    show(moved(wanted, start.centre - centre));
  });
  for (const end of ["pointerup", "pointercancel"] as const) {
    stage.addEventListener(end, (event) => {
      held.delete(event.pointerId);
      regrip();
    });
  }
}
