"use strict";
// The partition of every step on every rank as stacked bars: one row per rank, one column per step. A click shows the step.
Syncline.stepbars = (() => {
  const { text, readout, shades } = Syncline;
  const GUTTER = 96;
  const MOST = 32; // maximum number of ranks with a row

  // rows: [[rank, step, ms of each part ...]]
  const open = (figure, rows, { pick }) => {
    const canvas = figure.querySelector("canvas");
    const parts = Syncline.data.parts;
    const ranks = [...new Set(rows.map(([rank]) => rank))].sort((a, b) => a - b).slice(0, MOST);
    const steps = [...new Set(rows.map(([, step]) => step))].sort((a, b) => a - b);
    if (steps.length < 1) return { mark: () => {}, redraw: () => {} };
    figure.hidden = false;
    const cells = new Map(rows.map((row) => [`${row[0]} ${row[1]}`, row.slice(2)]));
    const whole = (cell) => cell.reduce((sum, ms) => sum + ms, 0);
    const sums = rows.map((row) => whole(row.slice(2))).sort((a, b) => a - b);
    // The first steps may take a hundred times as long: they are cut off, because they would flatten all others.
    const top = Math.min(sums[sums.length - 1], sums[Math.floor(sums.length / 2)] * 2.2) || 1;
    const height = Math.max(11, Math.min(40, Math.floor(260 / ranks.length)));
    const box = readout(figure.querySelector(".plot"));
    const cut = sums[sums.length - 1] > top ? "; longer steps are cut off at the top" : "";
    figure.querySelector(".note").textContent = `The height of a row is ${text.duration(top)}${cut}.`;
    let [current, focused] = [null, null];

    const width = () => figure.querySelector(".plot").clientWidth;
    const column = (n) => GUTTER + (n * (width() - GUTTER)) / steps.length;

    const draw = () => {
      const [w, h] = [width(), ranks.length * (height + 4) + 18];
      if (!w) return;
      const ctx = Syncline.paint.sized(canvas, w, h);
      ctx.textAlign = "left";
      const colours = shades.get();
      ctx.font = `11px ${colours.font}`;
      ctx.textBaseline = "middle";
      ranks.forEach((rank, line) => {
        const base = line * (height + 4) + height;
        ctx.fillStyle = colours.soft;
        if (height >= 11) ctx.fillText(`rank ${rank}`, 0, base - height / 2);
        if (line === 0 || height >= 24) {
          ctx.textAlign = "right";
          ctx.fillText(text.duration(top), GUTTER - 4, base - height + 6);
          if (height >= 24) ctx.fillText("0", GUTTER - 4, base - 5);
          ctx.textAlign = "left";
        }
        ctx.fillStyle = colours.track;
        ctx.fillRect(GUTTER, base - height, w - GUTTER, height);
        let last = -1;
        steps.forEach((step, n) => {
          const cell = cells.get(`${rank} ${step}`);
          const [a, b] = [column(n), column(n + 1)];
          if (!cell || Math.floor(a) === last) return;
          if (b - a < 1) last = Math.floor(a);
          const gap = b - a > 5 ? 1.5 : b - a > 2.5 ? 0.6 : 0;
          let at = base;
          cell.forEach((ms, part) => {
            const tall = Math.min((ms / top) * height, at - (base - height));
            if (tall <= 0) return;
            ctx.fillStyle = colours.part.get(parts[part].key);
            ctx.fillRect(a, at - tall, Math.max(b - a - gap, 0.8), tall);
            at -= tall;
          });
        });
      });
      const marks = Syncline.axes.ticks(0, steps.length - 1, Math.max(1, Math.min(12, (w - GUTTER) / 70))).filter((n) => Number.isInteger(n) && steps[n] !== undefined);
      ctx.fillStyle = colours.soft;
      ctx.textAlign = "center";
      for (const n of marks) ctx.fillText(String(steps[n]), Math.min(Math.max((column(n) + column(n + 1)) / 2, GUTTER + 6), w - 8), h - 7);
      ctx.textAlign = "left";
      ctx.fillText("step", 0, h - 7);
      const chosen = steps.indexOf(focused ?? current);
      if (chosen >= 0) {
        ctx.strokeStyle = colours.ink;
        ctx.lineWidth = 1.5;
        ctx.strokeRect(column(chosen) - 1, 0.75, Math.max(column(chosen + 1) - column(chosen), 2) + 1, h - 18);
      }
    };
    const redraw = Syncline.perFrame(draw);

    const tell = (n, line, x, y) => {
      const [rank, step] = [ranks[line], steps[n]];
      const cell = cells.get(`${rank} ${step}`);
      if (!cell) { box.hide(); return; }
      const shown = parts.map((part, i) => ({ cls: `p-${part.key}`, name: part.name, value: text.duration(cell[i]), ms: cell[i] })).filter(({ ms }) => ms > 0);
      box.show(x, y, `rank ${rank}, step ${step}: ${text.duration(whole(cell))}`, shown);
    };
    const spot = (event) => {
      const bounds = canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
      const n = Math.floor(((x - GUTTER) / (bounds.width - GUTTER)) * steps.length);
      return { x, y, n, line: Math.min(Math.floor(y / (height + 4)), ranks.length - 1) };
    };
    canvas.addEventListener("pointermove", (event) => {
      const { x, y, n, line } = spot(event);
      if (n >= 0 && n < steps.length) tell(n, line, x, y); else box.hide();
    });
    canvas.addEventListener("pointerleave", box.hide);
    canvas.addEventListener("click", (event) => { const { n } = spot(event); if (steps[n] !== undefined) pick(steps[n]); });
    canvas.addEventListener("blur", () => { focused = null; box.hide(); redraw(); });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!by) return;
      event.preventDefault();
      const n = Math.min(Math.max(steps.indexOf(focused ?? current) + by, 0), steps.length - 1);
      focused = steps[n];
      pick(focused);
      tell(n, 0, column(n), 20);
    });
    shades.changed(redraw);
    return { mark: (step) => { if (step !== current) { current = step; redraw(); } }, redraw };
  };

  return { open };
})();
