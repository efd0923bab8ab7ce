"use strict";
// One run's timeline: canvas, tools, search, step picker, pinned span. Drawn in an animation frame, and only when
// something changed.
Syncline.timeline = (() => {
  const { text, readout, shades, ruler, paint, inspect, layout: layouts } = Syncline;
  const MANY = 8; // with more ranks than this, the others are folded
  const REST = 10;

  const open = (panel, trace) => {
    const { set } = trace;
    const parts = Syncline.phases.of(set);
    const figure = panel.querySelector(".timeline");
    const part = (selector) => figure.querySelector(selector);
    const [stage, scroller, canvas] = [part(".stage"), part(".scroller"), part(".stage canvas")];
    const folded = new Set(set.ranks.length > MANY ? set.ranks.slice(MANY) : []);
    const box = readout(stage);
    const finder = Syncline.finder.of(set);
    let layout = layouts.of(set, { folded });
    let [pinned, hovered, step, counted] = [null, null, null, null]; // times count from step `counted`

    const redraw = Syncline.perFrame(() => draw());
    const view = Syncline.view.of(set, () => { box.hide(); hovered = null; redraw(); });
    const room = () => { // for the names of groups and streams
      const ctx = canvas.getContext("2d");
      ctx.font = `11px ${shades.get().font}`;
      return Math.max(...layout.groups.flatMap((group) => group.tracks.map((track) => ctx.measureText(track.label).width)), 0) + 18;
    };
    const gutter = () => (scroller.clientWidth < 560 ? 68 : Math.min(280, Math.max(84, Math.ceil(room()))));
    const plot = () => ({ left: gutter(), right: scroller.clientWidth - REST });
    const bars = Syncline.stepbars.open(panel.querySelector(".stepbars"), trace.steps, { pick: (number) => pick(number) });

    const draw = () => {
      if (!scroller.clientWidth) return;
      const begun = performance.now();
      const [width, height] = [scroller.clientWidth, scroller.clientHeight];
      const colours = shades.get();
      canvas.style.width = `${width}px`;
      const ctx = paint.sized(canvas, width, height);
      ctx.fillStyle = colours.card;
      ctx.fillRect(0, 0, width, height);
      const frame = { ...view.state, ...plot(), top: ruler.HEIGHT, bottom: height };
      const brush = paint.pen(ctx, frame);
      ruler.draw(brush, { zero: zero(), bottom: Math.min(height, layout.height + ruler.HEIGHT), width });
      paint.clipped(ctx, [frame.left, frame.top, frame.right - frame.left, height - frame.top], () => {
        gap(brush);
        paint.groups(brush, set, parts, layout, { shift: scroller.scrollTop, wanted: finder.state.marks });
        if (pinned !== null) inspect.frames(brush, set, layout, pinned, colours);
        if (hovered !== null && hovered !== pinned) {
          const line = layouts.place(layout, set.rowOf(hovered));
          if (line) paint.frame(brush, set, hovered, line, colours.soft);
        }
      });
      paint.clipped(ctx, [0, frame.top, width, height - frame.top],
        () => ruler.names(brush, layout, { shift: scroller.scrollTop, gutter: gutter(), bottom: height }));
      showPosition();
      stage.dataset.from = String(Math.round(view.state.from));
      stage.dataset.to = String(Math.round(view.state.to));
      api.paintMs = performance.now() - begun;
      stage.dataset.painted ??= String(Math.round(performance.now()));
    };

    // A label over the time of steps that are not in the page.
    const gap = (brush) => {
      if (!trace.gap) return;
      const before = set.stepOf(set.steps.findLast((number) => number < trace.gap[0]));
      const behind = set.stepOf(set.steps.find((number) => number > trace.gap[1]));
      if (!before || !behind) return;
      const { ctx, colours, left, right, from, scale } = brush;
      const a = Math.max(left, left + (before.to - from) * scale);
      const b = Math.min(right, left + (behind.from - from) * scale);
      if (b - a < 1) return;
      ctx.fillStyle = colours.track;
      ctx.fillRect(a, brush.top, b - a, brush.bottom - brush.top);
      ctx.fillStyle = colours.soft;
      ctx.font = `12px ${colours.font}`;
      ctx.textAlign = "center";
      ctx.fillText(paint.fit(ctx, `steps ${trace.gap[0]} to ${trace.gap[1]} are not in this page`, b - a - 8), (a + b) / 2, brush.top + 14);
    };

    const stepAt = (time) => {
      const at = Syncline.spans.first(0, set.steps.length, (n) => set.stepOf(set.steps[n]).to > time);
      return set.steps[Math.min(at, set.steps.length - 1)] ?? null;
    };
    const showPosition = () => {
      const { from, to } = view.state;
      const [low, high] = [from - zero(), to - zero()].map(text.time);
      part(".where").textContent = `${text.time(to - from)} in view: ${low} to ${high} from the ${counted === null ? "first span" : `start of step ${counted}`}`;
      bars.mark(step);
    };

    const zero = () => (counted === null ? set.begin : set.stepOf(counted).from);
    const mark = (number) => {
      step = counted = number;
      part("input.step").value = number;
      redraw();
    };
    const whole = () => { counted = null; view.all(); redraw(); };
    const pick = (number) => {
      const bounds = set.stepOf(number);
      if (!bounds) {
        part(".where").textContent = `step ${number} is not in this page`;
        return;
      }
      mark(number);
      view.fit(bounds);
      if (part(".astext").open) Syncline.steptable.fill(part(".astext .scroll"), set, parts, step);
    };
    const turn = (by) => {
      const here = step ?? stepAt((view.state.from + view.state.to) / 2);
      const at = set.steps.indexOf(here) + by;
      if (at >= 0 && at < set.steps.length) pick(set.steps[at]);
    };

    const pin = (index) => {
      pinned = index;
      inspect.details(part(".pinned"), set, parts, index, () => { pin(null); canvas.focus(); });
      redraw();
    };
    // Moves as little as needed to show a span, and zooms in if it would be too thin.
    const reveal = (index) => {
      const [from, to] = [set.start[index], set.end[index]];
      const wide = view.state.to - view.state.from;
      const width = (to - from) * 600 < wide ? Math.max((to - from) * 120, 20000) : wide;
      if (width !== wide || from < view.state.from || to > view.state.to) view.show((from + to - width) / 2, (from + to + width) / 2);
      const row = set.rowOf(index);
      if (folded.delete(row.rank)) relayout();
      const line = layouts.place(layout, row);
      const room = scroller.clientHeight - ruler.HEIGHT;
      if (line.y < scroller.scrollTop || line.y + line.height > scroller.scrollTop + room) scroller.scrollTop = line.y - room / 2;
    };
    const walk = (by) => {
      const index = finder.walk(by, view.state.from);
      if (index !== null) { reveal(index); pin(index); }
      part(".found").textContent = finder.summary();
    };
    const search = (query) => {
      finder.search(query);
      part(".found").textContent = finder.summary();
      redraw();
    };
    const find = (query) => {
      part('input[type="search"]').value = query;
      search(query);
      walk(1);
    };
    const along = (by) => {
      const row = pinned === null ? null : set.rowOf(pinned);
      let next = row ? Math.min(Math.max(pinned + by, row.from), row.to - 1) : -1;
      if (!row) {
        const work = set.rows.find((one) => one.lane !== "step") ?? set.rows[0];
        if (!work) return;
        next = Math.min(set.reaching(work, view.state.from), work.to - 1);
      }
      reveal(next);
      pin(next);
    };

    const relayout = () => {
      layout = layouts.of(set, { folded });
      part(".tall").style.height = `${Math.max(0, layout.height + ruler.HEIGHT - Math.min(layout.height + ruler.HEIGHT, tallest()))}px`;
      scroller.style.height = `${Math.min(layout.height + ruler.HEIGHT, tallest())}px`;
      redraw();
    };
    const tallest = () => Math.max(320, Math.min(760, window.innerHeight * 0.75));
    const hit = (x, y) => {
      const { group, row } = layouts.at(layout, y - ruler.HEIGHT + scroller.scrollTop);
      const { left, right } = plot();
      if (!row || x < left || x > right || y < ruler.HEIGHT) return { group, found: null };
      const per = (view.state.to - view.state.from) / (right - left);
      return { group, found: inspect.under(set, row, view.state.from + (x - left) * per, per * inspect.NEAR) };
    };
    const target = {
      view, plot,
      scroll: (by) => { scroller.scrollTop += by; },
      leave: () => { box.hide(); if (hovered !== null) { hovered = null; redraw(); } },
      hover: (x, y) => {
        const { group, found } = hit(x, y);
        canvas.classList.toggle("points", Boolean(found) || Boolean(group && x < gutter()));
        const index = found ? found.index : null;
        if (index !== hovered) { hovered = index; redraw(); }
        if (found) box.show(x, y + 14, ...inspect.tip(set, parts, found)); else box.hide();
      },
      click: (x, y) => {
        const { group, found } = hit(x, y);
        if (found) pin(found.index);
        else if (group && x < gutter()) fold(group.rank);
        else pin(null);
      },
      open: (x, y) => {
        const { found } = hit(x, y);
        if (found) view.fit({ from: set.start[found.index], to: set.end[found.index] });
      },
    };
    const fold = (rank) => { if (!folded.delete(rank)) folded.add(rank); relayout(); };
    const foldAll = () => {
      const all = set.ranks.every((rank) => folded.has(rank));
      folded.clear();
      if (!all) for (const rank of set.ranks) folded.add(rank);
      relayout();
    };
    const zoomIn = () => view.zoom(0.7);
    const zoomOut = () => view.zoom(1 / 0.7);
    const left = () => view.move(-0.15);
    const right = () => view.move(0.15);
    const scrolled = (by) => () => { const before = scroller.scrollTop; scroller.scrollTop += by; return scroller.scrollTop !== before; };
    const fit = () => pick(step ?? stepAt((view.state.from + view.state.to) / 2));
    target.keys = {
      w: zoomIn, "+": zoomIn, "=": zoomIn, s: zoomOut, "-": zoomOut, a: left, ArrowLeft: left, d: right, ArrowRight: right,
      ArrowUp: scrolled(-40), ArrowDown: scrolled(40), PageUp: () => turn(-1), PageDown: () => turn(1), f: fit, 0: whole,
      r: foldAll, ",": () => along(-1), ".": () => along(1), Escape: () => (pinned === null ? false : pin(null)),
      "/": () => part('input[type="search"]').focus(),
    };
    Syncline.gestures.attach(canvas, target);
    const actions = { previous: () => turn(-1), next: () => turn(1), in: zoomIn, out: zoomOut, fit, all: whole, before: () => walk(-1), after: () => walk(1) };
    for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
    part("input.step").addEventListener("change", (event) => {
      const near = set.nearest(Number(event.target.value));
      if (near !== undefined) pick(near);
    });
    part('input[type="search"]').addEventListener("input", (event) => search(event.target.value));
    part('input[type="search"]').addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); walk(event.shiftKey ? -1 : 1); }
      if (event.key === "Escape") { event.target.value = ""; search(""); canvas.focus(); }
    });
    part(".astext").addEventListener("toggle", () => { if (part(".astext").open) Syncline.steptable.fill(part(".astext .scroll"), set, parts, step); });
    scroller.addEventListener("scroll", () => { box.hide(); redraw(); }, { passive: true });
    shades.changed(redraw);
    new ResizeObserver(() => { relayout(); bars.redraw(); }).observe(stage);

    part(".of").textContent = set.steps.length ? `of ${set.steps[0]} to ${set.steps[set.steps.length - 1]}` : "no steps";
    const api = { trace, set, parts, view, pick, find, search, pin, redraw, paintMs: 0, pinned: () => pinned, step: () => step, layout: () => layout, plot, found: () => finder.summary() };
    relayout();
    const typical = set.typical(trace.steady);
    if (typical !== null) pick(typical); else whole();
    bars.redraw();
    return api;
  };

  return { open };
})();
