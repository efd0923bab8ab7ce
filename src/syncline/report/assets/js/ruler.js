"use strict";
// The time axis above a timeline and the names on its left.
Syncline.ruler = (() => {
  const { axes } = Syncline;
  const HEIGHT = 22;

  // Ticks in milliseconds from `zero`, with as many digits as their spacing needs.
  const draw = (brush, { zero, bottom, width }) => {
    const { ctx, colours, from, to, left, right, scale } = brush;
    ctx.fillStyle = colours.card;
    ctx.fillRect(0, 0, width, HEIGHT);
    ctx.font = `11px ${colours.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "center";
    const wide = right - left < 400 ? 62 : 84;
    const ticks = axes.ticks((from - zero) / 1e6, (to - zero) / 1e6, Math.max(2, Math.floor((right - left) / wide)));
    const gap = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
    const [unit, factor] = gap >= 1000 ? ["s", 1e-3] : gap >= 0.01 ? ["ms", 1] : ["µs", 1e3];
    const digits = Math.max(0, -Math.floor(Math.log10(gap * factor) + 1e-9));
    for (const tick of ticks) {
      const x = Math.round(left + (tick * 1e6 + zero - from) * scale) + 0.5;
      ctx.strokeStyle = colours.rule;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x, HEIGHT - 4);
      ctx.lineTo(x, bottom);
      ctx.stroke();
      const text = `${(tick * factor).toFixed(digits)} ${unit}`;
      ctx.fillStyle = colours.soft;
      const half = ctx.measureText(text).width / 2;
      if (x + half <= right + 2) ctx.fillText(text, Math.max(x, left + half - 4), HEIGHT / 2 - 1);
    }
  };

  // Names of ranks and lanes, drawn over spans that reach too far to the left.
  const names = (brush, layout, { shift, gutter, bottom }) => {
    const { ctx, colours, top } = brush;
    ctx.fillStyle = colours.card;
    ctx.fillRect(0, top, gutter, bottom - top);
    ctx.textBaseline = "middle";
    for (const group of layout.groups) {
      const y = group.y - shift + top;
      if (y > bottom || y + group.height < top) continue;
      ctx.textAlign = "left";
      ctx.font = `600 12px ${colours.font}`;
      ctx.fillStyle = colours.ink;
      ctx.fillText(`${group.folded ? "▸" : "▾"} ${group.label ?? `rank ${group.rank}`}`, 2, y + group.head / 2 - 1);
      ctx.font = `11px ${colours.font}`;
      ctx.fillStyle = colours.soft;
      ctx.textAlign = "right";
      for (const track of group.tracks) ctx.fillText(Syncline.paint.fit(ctx, track.label, gutter - 10), gutter - 8, track.y - shift + top + track.height / 2);
    }
  };

  return { draw, names, HEIGHT };
})();
