"use strict";
// Draws rows of spans on a canvas. Spans narrower than a pixel are merged: the share of a pixel column that they cover sets
// its opacity, and equal columns become one bar. So the cost of a frame depends on pixels, not on spans.
Syncline.paint = (() => {
  const { phases, shades } = Syncline;
  const NARROW = 1.2;
  const LABEL = 30;
  const DIM = 0.16;
  const HIDDEN = 0.55;

  // pen: {ctx, from, scale (pixels per nanosecond), left, right, top, bottom, colours}
  const pen = (ctx, { from, to, left, right, top, bottom }) => ({
    ctx, from, to, left, right, top, bottom, scale: (right - left) / (to - from || 1), colours: shades.get() });

  // Collects spans that are too narrow to be drawn one by one.
  const density = (ctx, y, height, alpha) => {
    let [column, covered, open, level, until] = [-1, 0, -1, 0, -1];
    const put = () => {
      if (open < 0) return;
      ctx.globalAlpha = level * alpha;
      ctx.fillRect(open, y, until - open, height);
      open = -1;
    };
    const close = () => {
      if (column < 0) return;
      const next = covered > 0.6 ? 1 : covered > 0.25 ? 0.75 : 0.5;
      if (open >= 0 && next === level && column === until) until += 1;
      else { put(); [open, level, until] = [column, next, column + 1]; }
      [column, covered] = [-1, 0];
    };
    return {
      add: (x, width) => {
        const here = Math.floor(x);
        if (here !== column) { close(); column = here; }
        covered += width;
      },
      flush: () => { close(); put(); ctx.globalAlpha = alpha; },
    };
  };

  // Draws the spans of a row; with `wanted` (a mark for each kind), only those whose mark is `mark`. Returns those with room for text.
  const bars = (brush, set, row, { y, height, alpha = 1, wanted = null, mark = 1, roomy = [] }) => {
    const { ctx, from, to, left, right, scale } = brush;
    const { start, end, kind } = set;
    const tiny = density(ctx, y, height, alpha);
    ctx.globalAlpha = alpha;
    for (let i = set.reaching(row, from); i < row.to && start[i] < to; i += 1) {
      if (wanted !== null && wanted[kind[i]] !== mark) continue;
      const x = left + (start[i] - from) * scale;
      const width = (end[i] - start[i]) * scale;
      if (width < NARROW) { if (end[i] >= from) tiny.add(Math.max(x, left), width); continue; }
      tiny.flush();
      const a = Math.max(x, left);
      const b = Math.min(x + width, right);
      if (b <= a) continue;
      ctx.fillRect(a, y, b - a > 3 ? b - a - 0.8 : b - a, height);
      if (b - a > LABEL) roomy.push(i, a, b);
    }
    tiny.flush();
    ctx.globalAlpha = 1;
    return roomy;
  };

  // Draws intervals of one colour each: the partition, or the lighter cover over hidden time.
  const stretches = (brush, { start, end }, colour, y, height, alpha) => {
    const { ctx, from, to, left, right, scale } = brush;
    let i = Syncline.spans.first(0, start.length, (at) => end[at] > from);
    let [x0, x1, last] = [0, -1, null];
    const put = () => { if (x1 > x0) { ctx.fillStyle = last; ctx.fillRect(x0, y, x1 - x0, height); } };
    ctx.globalAlpha = alpha;
    for (; i < start.length && start[i] < to; i += 1) {
      const a = Math.max(left, left + (start[i] - from) * scale);
      const b = Math.min(right, left + (end[i] - from) * scale);
      const shade = colour(i);
      // An interval of less than half a pixel is merged with its neighbour.
      if (b - a < 0.5 && a <= x1 + 0.5) { x1 = Math.max(x1, b); continue; }
      if (shade === last && a <= x1 + 0.01) { x1 = b; continue; }
      put();
      [x0, x1, last] = [a, b, shade];
    }
    put();
    ctx.globalAlpha = 1;
  };

  const widths = new Map();
  const fit = (ctx, text, room) => {
    if (!widths.has(text)) { if (widths.size > 5000) widths.clear(); widths.set(text, ctx.measureText(text).width); }
    const width = widths.get(text);
    if (width <= room) return text;
    const keep = Math.floor((text.length * (room - 8)) / width);
    return keep < 2 ? "" : `${text.slice(0, keep)}…`;
  };

  const label = (set, row, i) => {
    if (row.lane === "step") return `step ${set.step[i]}  ${Syncline.text.time(set.end[i] - set.start[i])}`;
    return set.unit(i) || set.name(i);
  };

  // `cover` is given for rows with hidden time: text on a mostly hidden span needs the colour for a light background.
  const labels = (brush, set, line, roomy, cover) => {
    const { ctx, colours } = brush;
    if (line.height < 10) return;
    const inside = colours.inside.get(line.row.lane) || colours.ink;
    for (let n = 0; n < roomy.length; n += 3) {
      const [from, to] = [Math.max(set.start[roomy[n]], brush.from), Math.min(set.end[roomy[n]], brush.to)];
      ctx.fillStyle = cover && cover.hidden(from, to) > (to - from) / 2 ? colours.ink : inside;
      const text = fit(ctx, label(set, line.row, roomy[n]), roomy[n + 2] - roomy[n + 1] - 8);
      if (text) ctx.fillText(text, roomy[n + 1] + 4, line.y - brush.shift + line.height / 2 + 0.5);
    }
  };

  // Draws all visible groups of a layout. `shift` is how far the layout is scrolled up; `wanted` marks kinds.
  const groups = (brush, set, parts, layout, { shift = 0, wanted = null } = {}) => {
    const { ctx, colours, top, bottom } = brush;
    brush.shift = shift - top;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.direction = "ltr";
    ctx.font = `11px ${colours.font}`;
    for (const group of layout.groups) {
      const y = group.y - brush.shift;
      if (y > bottom || y + group.height < top) continue;
      const part = parts.get(group.rank);
      stretches(brush, part, (i) => colours.part.get(phases.PHASE[part.phase[i]]), y, group.head - 2, wanted ? 0.3 : 1);
      for (const track of group.tracks) {
        const at = track.y - brush.shift;
        if (at > bottom || at + track.height < top) continue;
        const texts = track.rows.map((line) => {
          const where = { y: line.y - brush.shift, height: line.height };
          ctx.fillStyle = colours.lane.get(track.lane) || colours.faint;
          if (!wanted) return bars(brush, set, line.row, where);
          bars(brush, set, line.row, { ...where, alpha: DIM, wanted, mark: 0 });
          return bars(brush, set, line.row, { ...where, wanted, mark: 1 });
        });
        const cover = phases.HIDEABLE.has(track.lane) && !wanted ? part.cover : null;
        if (cover) stretches(brush, cover, () => colours.card, at, track.height, HIDDEN);
        track.rows.forEach((line, n) => labels(brush, set, line, texts[n], cover));
      }
    }
  };

  // The canvas with `width` by `height` pixels of CSS, ready to be drawn on. Setting its size would clear it.
  const sized = (canvas, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    const [wide, tall] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    return ctx;
  };

  // Draws inside a rectangle only.
  const clipped = (ctx, rect, draw) => {
    ctx.save();
    ctx.beginPath();
    ctx.rect(...rect);
    ctx.clip();
    draw();
    ctx.restore();
  };

  // A frame around one span.
  const frame = (brush, set, i, line, colour) => {
    const { ctx, from, left, right, scale } = brush;
    const a = Math.max(left, left + (set.start[i] - from) * scale);
    const b = Math.min(right, left + (set.end[i] - from) * scale);
    if (b < left || a > right) return;
    ctx.strokeStyle = colour;
    ctx.lineWidth = 2;
    ctx.strokeRect(a - 1, line.y - brush.shift - 1, Math.max(b - a, 2) + 1.5, line.height + 2);
  };

  return { pen, groups, frame, fit, stretches, sized, clipped };
})();
