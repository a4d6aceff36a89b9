// Elements from data. Text is always text: nothing that comes from a record is read as HTML.

type Child = Node | string | null | undefined | false;
type Attributes = Record<
  string,
  string | number | boolean | null | undefined | ((event: never) => void)
>;

function filled<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

export const h = <K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] => filled(document.createElement(tag), attributes, children);

export const svg = <K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** An element with styles set one by one, which a strict policy allows. */
export function styled<E extends HTMLElement>(element: E, styles: Record<string, string>): E {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
  return element;
}

/** The colours and fonts of the style sheet, for what is drawn on a canvas. */
export function colours(): (name: string) => string {
  const computed = getComputedStyle(document.documentElement);
  return (name) => computed.getPropertyValue(`--${name}`).trim();
}

/** The name of a category's colour. */
export const colourOf = (category: string): string =>
  `c-${category.toLowerCase().replace(/[^a-z]+/g, "-")}`;
