"""JavaScript that looks at what was drawn."""

from __future__ import annotations

# How many pixels of a canvas are nearly of a colour of the style sheet.
NEARLY = """(canvas, name) => {
  const style = getComputedStyle(document.documentElement);
  const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
  const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    const far = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
    if (data[at + 3] > 200 && far < 24) count++;
  }
  return count;
}"""
