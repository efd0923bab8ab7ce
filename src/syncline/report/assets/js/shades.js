"use strict";
// Colours for canvases, read from the page's style, and again when the colour scheme changes.
Syncline.shades = (() => {
  const LANES = ["step", "data", "forward", "backward", "encode", "exchange", "decode", "update", "between", "wait"];
  let current = null;
  const listeners = new Set();

  const read = () => {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const named = (names) => Object.fromEntries(names.map((name) => [name, value(`--${name}`)]));
    return {
      ...named(["paper", "card", "ink", "soft", "faint", "rule", "track", "accent"]),
      lane: new Map(LANES.map((lane) => [lane, value(`--l-${lane}`)])),
      inside: new Map(LANES.map((lane) => [lane, value(`--t-${lane}`)])),
      part: new Map(Syncline.data.parts.map(({ key }) => [key, value(`--p-${key}`)])),
      font: getComputedStyle(document.body).fontFamily,
    };
  };
  const get = () => { current ??= read(); return current; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    current = null;
    for (const listener of listeners) listener();
  });

  return { get, changed: (listener) => listeners.add(listener) };
})();
