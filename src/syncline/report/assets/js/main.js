"use strict";
// Draws every chart, redraws it when its width changes, and connects the switches.
(() => {
  const widths = new WeakMap();
  const observer = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const width = Math.round(contentRect.width);
      if (width === 0 || widths.get(target) === width) continue;
      widths.set(target, width);
      Syncline.draw(target.closest("[data-chart]"));
    }
  });
  for (const figure of document.querySelectorAll("[data-chart]")) {
    for (const button of figure.querySelectorAll(".switch button")) {
      button.addEventListener("click", () => {
        for (const other of figure.querySelectorAll(".switch button")) other.setAttribute("aria-pressed", String(other === button));
        Syncline.draw(figure);
      });
    }
    const plot = figure.querySelector(".plot");
    widths.set(plot, Math.round(plot.clientWidth));
    Syncline.draw(figure);
    observer.observe(plot);
  }
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
