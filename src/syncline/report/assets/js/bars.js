"use strict";
// Horizontal bars, one per row, with the name above the bar, so that long names need no margin.
Syncline.bars = (() => {
  const { svg, html, readout, colorClass } = Syncline;
  const ROW = 50;
  const BAR = 22;

  // rows: [{color, label, note, pieces: [{cls, value, name, value text, inside}], tick, range}]; `top` ends the scale.
  const bars = (plot, rows, { width, top, title }) => {
    if (!rows.length) {
      plot.append(html("p", { class: "empty" }, "All strategies are hidden: choose one in the legend."));
      return;
    }
    const height = rows.length * ROW + 4;
    const root = svg("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
    plot.append(root);
    const box = readout(plot);
    const scale = (value) => (Math.max(value, 0) / (top || 1)) * (width - 2);
    rows.forEach((row, i) => {
      const y = i * ROW + 20;
      const name = svg("text", { class: "label", x: 13, y: y - 6 }, row.label);
      root.append(
        svg("rect", { class: `dot ${colorClass(row.color)}`, x: 0, y: y - 14, width: 9, height: 9, rx: 2 }), name,
        svg("text", { class: "total", x: width - 1, y: y - 6, "text-anchor": "end" }, row.note),
        svg("rect", { class: "track", x: 0, y, width: width - 2, height: BAR, rx: 3 }));
      shorten(name, row.label, width - 26 - root.lastChild.previousSibling.getComputedTextLength());
      let x = 0;
      for (const piece of row.pieces) {
        const wide = scale(piece.value);
        const rect = svg("rect", { class: `piece ${piece.cls}`, x, y, width: Math.max(wide, piece.value > 0 ? 1 : 0), height: BAR });
        rect.addEventListener("pointermove", (event) => {
          const bounds = plot.getBoundingClientRect();
          box.show(event.clientX - bounds.left, event.clientY - bounds.top, row.label, piece.rows);
        });
        rect.addEventListener("pointerleave", box.hide);
        root.append(rect);
        if (piece.inside && wide > piece.inside.length * 7 + 8) {
          root.append(svg("text", { class: `inside ${piece.cls}`, x: x + wide / 2, y: y + 15.5, "text-anchor": "middle" }, piece.inside));
        }
        x += wide;
      }
      if (row.range) {
        const [low, high] = row.range.map(scale);
        root.append(svg("path", { class: "range", d: `M${low},${y + BAR / 2}H${high}M${low},${y + 7}v8M${high},${y + 7}v8` }));
      }
      if (row.tick) root.append(svg("line", { class: "tick", x1: scale(row.tick), x2: scale(row.tick), y1: y - 1, y2: y + BAR + 4 }));
    });
  };

  const shorten = (node, label, room) => {
    let kept = label.length;
    while (kept > 4 && node.getComputedTextLength() > room) {
      kept = Math.floor(kept * 0.85);
      node.textContent = `${label.slice(0, kept)}…`;
    }
  };

  return bars;
})();
