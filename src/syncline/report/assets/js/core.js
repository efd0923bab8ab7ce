"use strict";
// Shared by all charts: the data, drawing helpers, figures as text, which runs are shown, and the read-out.
// A section adds itself with Syncline.chart(id, draw); draw(figure, view) fills view.plot and is called again
// whenever the size, the legend or the section's switch changes.
const Syncline = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const charts = new Map();
  const COLORS = 10;

  const build = (create) => (tag, attributes = {}, ...children) => {
    const node = create(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.flat().filter((child) => child !== null));
    return node;
  };
  const html = build((tag) => document.createElement(tag));
  const svg = build((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

  // A long name may break after a bracket, a comma or a bar, never inside a word.
  const pieces = (name) => name.split(/(?<=[(,|])/).flatMap((piece, i) => (i ? [html("wbr"), piece] : [piece]));

  const significant = (value, digits = 3) => {
    if (value === 0) return "0";
    if (Math.abs(value) >= 10 ** (digits - 1)) return value.toFixed(0);
    if (Math.abs(value) < 1e-4) return value.toExponential(1);
    return String(Number(value.toPrecision(digits)));
  };
  // In the largest unit that the value reaches, or else in the last one.
  const scaled = (value, units) => {
    const [unit, factor] = units.find(([, least]) => Math.abs(value) >= least) ?? units[units.length - 1];
    return `${significant(value / factor)} ${unit}`;
  };
  const text = {
    significant,
    duration: (ms) => (Math.abs(ms) >= 10000 ? `${significant(ms / 1000)} s` : `${significant(ms)} ms`),
    percent: (share) => (share * 100 >= 9.95 || share === 0 ? `${(share * 100).toFixed(0)}%` : `${share > 0 && share < 0.0005 ? significant(share * 100) : Number((share * 100).toFixed(1))}%`),
    times: (ratio) => `${ratio.toFixed(2)}x`,
    size: (bytes) => scaled(bytes, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]),
    // Nanoseconds; seconds from ten on.
    time: (ns) => (Math.abs(ns) >= 1e10 ? `${significant(ns / 1e9)} s` : scaled(ns, [["ms", 1e6], ["µs", 1e3], ["ns", 1]])),
    bandwidth: (bits) => scaled(bits, [["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3], ["bit/s", 1]]),
  };

  const colorClass = (color) => `s${color % COLORS}${color >= COLORS ? " again" : ""}`;
  const shown = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !hidden.has(index));

  // One legend state for the page: a strategy switched off in one chart is off in all.
  const toggle = (index, alone) => {
    if (alone) {
      const others = data.runs.map((run, other) => other).filter((other) => other !== index);
      const already = !hidden.has(index) && hidden.size === data.runs.length - 1;
      hidden.clear();
      if (!already) for (const other of others) hidden.add(other);
    } else if (!hidden.delete(index)) hidden.add(index);
    drawAll();
  };

  const legend = (figure, indices) => {
    const box = figure.querySelector(".legend");
    const focused = box.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    box.replaceChildren(...indices.map((index) => {
      const chip = html("button", {
        type: "button", class: `chip ${colorClass(data.runs[index].color)}`, "data-run": index,
        "aria-pressed": String(!hidden.has(index)), title: "click: show or hide; shift-click: show this one alone",
      }, html("span", { class: `swatch ${colorClass(data.runs[index].color)}`, "aria-hidden": "true" }), html("bdi", {}, pieces(data.runs[index].label)));
      chip.addEventListener("click", (event) => toggle(index, event.shiftKey));
      return chip;
    }));
    if (focused !== null) box.querySelector(`[data-run="${focused}"]`)?.focus();
  };

  // The read-out follows the pointer inside one plot and never leaves it.
  const readout = (plot) => {
    const box = html("div", { class: "readout", role: "status" });
    plot.append(box);
    return {
      hide: () => box.classList.remove("on"),
      show: (x, y, title, rows) => {
        box.replaceChildren(html("p", {}, title), ...rows.map(({ cls, name, value }) =>
          html("div", {}, html("span", { class: `swatch ${cls}` }), html("bdi", {}, name), html("b", {}, value))));
        box.classList.add("on");
        const left = x + 16 + box.offsetWidth > plot.clientWidth ? x - 16 - box.offsetWidth : x + 16;
        // With no room at either side it goes below or above, so that it does not cover the value.
        const below = y + 18 + box.offsetHeight > plot.clientHeight ? y - 18 - box.offsetHeight : y + 18;
        const top = left < 0 ? below : y - box.offsetHeight / 2;
        box.style.left = `${Math.max(0, Math.min(left, plot.clientWidth - box.offsetWidth))}px`;
        box.style.top = `${Math.max(0, Math.min(top, plot.clientHeight - box.offsetHeight))}px`;
      },
    };
  };

  // Calls `draw` in the next animation frame, however often it is asked before.
  const perFrame = (draw) => {
    let waiting = false;
    return () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    };
  };

  const chart = (id, draw) => charts.set(id, draw);
  const draw = (figure) => {
    const plot = figure.querySelector(".plot");
    const pressed = figure.querySelector('.switch [aria-pressed="true"]');
    plot.replaceChildren();
    charts.get(figure.dataset.chart)(figure, { plot, width: Math.max(plot.clientWidth, 240), option: pressed?.dataset.option });
  };
  const drawAll = () => document.querySelectorAll("[data-chart]").forEach(draw);

  return { data, hidden, html, svg, pieces, text, colorClass, shown, legend, readout, perFrame, chart, draw, drawAll };
})();
