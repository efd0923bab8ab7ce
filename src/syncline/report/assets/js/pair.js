"use strict";
// Two steps of any two runs above each other on one time scale: what is hidden behind compute and what is not.
Syncline.pair = (() => {
  const { html, text, readout, shades, ruler, paint, inspect, layout: layouts } = Syncline;
  const GUTTER = 84;

  // The parts of one step of one rank, in ns, from the partition along time.
  const sums = ({ start, end, phase }, { from, to }) => {
    const found = new Map(Syncline.data.parts.map(({ key }) => [key, 0]));
    for (let i = Syncline.spans.first(0, start.length, (n) => end[n] > from); i < start.length && start[i] < to; i += 1) {
      const key = Syncline.phases.PHASE[phase[i]];
      found.set(key, found.get(key) + Math.min(end[i], to) - Math.max(start[i], from));
    }
    return found;
  };

  const open = (figure, runs) => {
    const part = (selector) => figure.querySelector(selector);
    const [canvas, box] = [part("canvas"), readout(part(".stage"))];
    const choose = (side, of) => part(`[data-side="${side}"][data-of="${of}"]`);
    const partsOf = new Map();
    const sides = [{}, {}];
    const redraw = Syncline.perFrame(() => draw());

    const take = (side, run, step) => {
      const trace = Syncline.spans.trace(run);
      if (!partsOf.has(run)) partsOf.set(run, Syncline.phases.of(trace.set));
      const number = step ?? trace.shown ?? trace.set.typical(trace.steady);
      sides[side] = { run, trace, parts: partsOf.get(run), step: number };
      choose(side, "run").value = String(run);
      choose(side, "step").value = number ?? "";
    };
    const rank = () => Number(part('[data-of="rank"]').value);

    // The step of this rank, or of all ranks if this rank has none.
    const bounds = ({ trace, step }, wanted) => trace.set.stepOf(step, wanted) ?? trace.set.stepOf(step);
    const arranged = () => {
      const found = [];
      let top = 0;
      for (const side of sides) {
        const wanted = side.trace.set.ranks.includes(rank()) ? rank() : side.trace.set.ranks[0];
        const limits = bounds(side, wanted);
        if (!limits) continue;
        const layout = layouts.of(side.trace.set, { ranks: [wanted], top: top + 20 });
        for (const group of layout.groups) group.label = `rank ${wanted}`;
        top = layout.height + 4;
        found.push({ ...side, wanted, limits, layout });
      }
      return { shown: found, height: top };
    };

    const draw = () => {
      const width = part(".stage").clientWidth;
      if (!width) return;
      const { shown, height } = arranged();
      const ctx = paint.sized(canvas, width, height + ruler.HEIGHT);
      const colours = shades.get();
      const longest = Math.max(...shown.map(({ limits }) => limits.to - limits.from), 1) * 1.03;
      const gutter = width < 560 ? 68 : GUTTER;
      shown.forEach((side, n) => {
        const [from, to] = [side.limits.from, side.limits.from + longest];
        const frame = { from, to, left: gutter, right: width - 10, top: ruler.HEIGHT, bottom: height + ruler.HEIGHT };
        const brush = paint.pen(ctx, frame);
        if (!n) ruler.draw(brush, { zero: from, bottom: height + ruler.HEIGHT, width });
        side.brush = brush;
        const { y, height: tall } = side.layout.groups[0];
        paint.clipped(ctx, [gutter, frame.top, frame.right - gutter, height], () => {
          paint.groups(brush, side.trace.set, side.parts, side.layout);
          // Everything after the end of the step belongs to the next one.
          const end = gutter + (side.limits.to - from) * brush.scale;
          ctx.globalAlpha = 0.72;
          ctx.fillStyle = colours.card;
          ctx.fillRect(end, y + ruler.HEIGHT, frame.right - end, tall);
          ctx.globalAlpha = 1;
          ctx.fillStyle = colours.ink;
          ctx.fillRect(end - 0.75, y + ruler.HEIGHT - 3, 1.5, tall + 3);
        });
        paint.clipped(ctx, [0, y + ruler.HEIGHT, gutter, tall],
          () => ruler.names(brush, side.layout, { shift: 0, gutter, bottom: brush.bottom }));
        ctx.fillStyle = colours.ink;
        ctx.font = `600 12.5px ${colours.font}`;
        ctx.textAlign = "left";
        ctx.fillText(paint.fit(ctx, `${side.trace.label}, step ${side.step}: ${text.time(side.limits.to - side.limits.from)}`, width - gutter - 20), gutter, y + ruler.HEIGHT - 10);
      });
      figure.drawn = shown;
      tell(shown);
    };

    // The comparison as a sentence and a table.
    const tell = (shown) => {
      const say = part(".says");
      if (shown.length < 2) { say.textContent = "One of the two has no such step."; return; }
      const [a, b] = shown.map((side) => ({ label: side.trace.label, step: side.step, time: side.limits.to - side.limits.from, sums: sums(side.parts.get(side.wanted), side.limits) }));
      const name = (one) => html("bdi", {}, a.label === b.label ? `step ${one.step}` : one.label);
      const gap = b.time - a.time;
      const moved = Syncline.data.parts.map((one) => ({ ...one, by: b.sums.get(one.key) - a.sums.get(one.key) }))
        .sort((x, y) => Math.abs(y.by) - Math.abs(x.by))[0];
      say.replaceChildren(name(b), ` takes ${text.time(b.time)}, ${text.time(Math.abs(gap))} ${gap < 0 ? "less" : "more"} than `, name(a),
        moved.by ? `; the largest difference is ${moved.name}, ${text.time(a.sums.get(moved.key))} and ${text.time(b.sums.get(moved.key))}.` : ".");
      const head = (label, one) => html("th", { scope: "col" }, html("bdi", {}, label), ` step ${one.step}`);
      const rows = Syncline.data.parts.filter(({ key }) => a.sums.get(key) || b.sums.get(key)).map(({ key, name: title }) => html("tr", {},
        html("th", { scope: "row" }, html("span", { class: `swatch p-${key}` }), ` ${title}`), html("td", {}, text.time(a.sums.get(key))), html("td", {}, text.time(b.sums.get(key))),
        html("td", {}, `${b.sums.get(key) >= a.sums.get(key) ? "+" : "−"}${text.time(Math.abs(b.sums.get(key) - a.sums.get(key)))}`)));
      part(".scroll").replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "part of the step"), head(a.label, a), head(b.label, b), html("th", { scope: "col" }, "difference"))), html("tbody", {}, rows)));
    };

    canvas.addEventListener("pointermove", (event) => {
      const bounds_ = canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - bounds_.left, event.clientY - bounds_.top];
      for (const side of figure.drawn ?? []) {
        const { row } = layouts.at(side.layout, y - ruler.HEIGHT);
        if (!row || x < side.brush.left) continue;
        const found = inspect.under(side.trace.set, row, side.brush.from + (x - side.brush.left) / side.brush.scale, inspect.NEAR / side.brush.scale);
        if (found) { box.show(x, y + 14, ...inspect.tip(side.trace.set, side.parts, found)); return; }
      }
      box.hide();
    });
    canvas.addEventListener("pointerleave", box.hide);

    for (const side of [0, 1]) {
      choose(side, "run").replaceChildren(...runs.map(({ number, label }) => html("option", { value: number }, label)));
      choose(side, "run").addEventListener("change", (event) => { take(side, Number(event.target.value)); redraw(); });
      choose(side, "step").addEventListener("change", (event) => {
        take(side, sides[side].run, sides[side].trace.set.nearest(Number(event.target.value)));
        redraw();
      });
    }
    part('[data-of="rank"]').addEventListener("change", redraw);
    const start = () => {
      take(0, runs[0].number);
      // With one run: its first step and a typical one.
      if (runs.length > 1) take(1, runs[runs.length - 1].number); else { take(1, runs[0].number); take(0, runs[0].number, sides[0].trace.set.steps[0]); }
      const ranks = [...new Set(sides.flatMap(({ trace }) => trace.set.ranks))].sort((a, b) => a - b);
      part('[data-of="rank"]').replaceChildren(...ranks.map((one) => html("option", { value: one }, String(one))));
      shades.changed(redraw);
      new ResizeObserver(redraw).observe(part(".stage"));
      redraw();
    };
    figure.hidden = false;
    // Decode the spans of other runs when the figure comes into view, not while the page opens.
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); start(); }
    }, { rootMargin: "400px" });
    observer.observe(figure);
  };

  return { open };
})();
