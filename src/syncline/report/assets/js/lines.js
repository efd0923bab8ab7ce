"use strict";
// Lines over a shared x axis, with a cross-hair that reads all of them at one x, by pointer or by arrow keys.
Syncline.lines = (() => {
  const { svg, readout, axes } = Syncline;

  // Keeps the extremes of every pixel column, so that a spike among thousands of points stays visible.
  const thin = (points, columns) => {
    if (points.length <= columns * 4) return points;
    const kept = [];
    const size = points.length / columns;
    for (let column = 0; column < columns; column += 1) {
      const slice = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
      const real = slice.filter(([, y]) => y !== null);
      if (!real.length) { kept.push(slice[0]); continue; }
      const low = real.reduce((a, b) => (b[1] < a[1] ? b : a));
      const high = real.reduce((a, b) => (b[1] > a[1] ? b : a));
      kept.push(...(low[0] < high[0] ? [low, high] : [high, low]));
    }
    return kept;
  };

  const path = (points, x, y) => {
    let pen = "M";
    let drawn = "";
    for (const [px, py] of points) {
      if (py === null) { pen = "M"; continue; }
      drawn += `${pen}${x(px).toFixed(1)},${y(py).toFixed(1)}`;
      pen = "L";
    }
    return drawn;
  };

  // Curves that coincide would hide each other: they share one stroke, in dashes of alternating colours.
  const DASH = 9;
  const share = (series, extent) => {
    const groups = [];
    for (const one of series.filter((candidate) => !candidate.quiet && !candidate.dashed)) {
      const same = groups.find(([first]) => {
        const both = one.points.filter(([, y], i) => y !== null && (first.points[i]?.[1] ?? null) !== null);
        const apart = one.points.filter(([, y], i) => Math.abs(y - (first.points[i]?.[1] ?? Infinity)) > extent * 0.004);
        return both.length > 1 && apart.length <= one.points.length * 0.05;
      });
      if (same) same.push(one); else groups.push([one]);
    }
    return new Map(groups.filter((group) => group.length > 1).flatMap((group) =>
      group.map((one, i) => [one, { "stroke-dasharray": `${DASH} ${DASH * (group.length - 1)}`, "stroke-dashoffset": -i * DASH, "stroke-linecap": "butt" }])));
  };

  const bounds = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  // series: [{cls, name, points: [[x, y|null]], dashed, dots, marks: [[x, y]], quiet}]
  // options: {width, height, log, zero, cap, xName, xLog, xTicks, xFormat, xMark, yRange, format, read, title}
  const lines = (plot, series, options) => {
    const { log = false, format } = options;
    const usable = (y) => y !== null && (!log || y > 0);
    const all = series.flatMap((one) => [...one.points, ...(one.marks ?? [])]);
    const ys = all.map((point) => point[1]).filter(usable);
    if (!ys.length) {
      plot.append(Syncline.html("p", { class: "empty" }, series.length ? "No finite value to draw." : "All strategies are hidden: choose one in the legend."));
      return;
    }
    let [low, high] = bounds(ys);
    if (options.cap && !log && high > options.cap) high = options.cap;
    if (log) [low, high] = [low / 1.12, high * 1.12];
    else {
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      [low, high] = [options.zero ? 0 : low - pad, high + pad];
    }
    if (options.yRange) [low, high] = options.yRange;
    let [first, last] = bounds(all.map((point) => point[0]));
    if (first === last) [first, last] = [first - 1, last + 1];
    const height = options.height ?? 320;
    const root = svg("svg", {
      class: "lines", viewBox: `0 0 ${options.width} ${height}`, width: options.width, height, role: "img",
      tabindex: "0", "aria-label": `${options.title}. Arrow keys read values.`,
    });
    const { x, y, box } = axes.frame(root, { ...options, height, log, range: { x: [first, last], y: [low, high] } });
    const clip = (value) => (log ? value : Math.min(value, high));
    const shared = share(series, high - low);
    for (const one of series) {
      const points = one.points.map(([px, py]) => [px, usable(py) ? clip(py) : null]);
      const group = svg("g", { class: `line ${one.cls}${one.dashed ? " dashed" : ""}${one.quiet ? " quiet" : ""}` });
      group.append(svg("path", { ...shared.get(one), d: path(thin(points, Math.floor(box.right - box.left)), x, y) }));
      const lone = points.filter(([, py]) => py !== null).length === 1;
      if (one.dots || lone) {
        for (const [px, py] of points) if (py !== null) group.append(svg("circle", { cx: x(px), cy: y(py), r: 3.5 }));
      }
      for (const [px, py] of one.marks ?? []) {
        if (!usable(py)) continue;
        const [cx, cy] = [x(px), y(clip(py))];
        group.append(svg("path", { class: "diamond", d: `M${cx},${cy - 5}l5,5l-5,5l-5,-5z` }));
      }
      root.append(group);
    }
    if (options.xMark) root.append(svg("line", { class: "xmark", x1: x(options.xMark), x2: x(options.xMark), y1: box.top, y2: box.bottom }));
    const cursor = svg("g", { class: "cursor" });
    root.append(cursor);
    plot.append(root);
    follow(plot, root, cursor, series, { ...options, x, y, box, clip, usable, format, range: [first, last] });
  };

  const follow = (plot, root, cursor, series, view) => {
    const box = readout(plot);
    const lookup = series.filter((one) => !one.quiet).map((one) => ({ ...one, at: new Map([...one.points, ...(one.marks ?? [])].map(([px, py]) => [px, py])) }));
    const xs = [...new Set(lookup.flatMap((one) => [...one.at.keys()]))].sort((a, b) => a - b);
    if (!xs.length) return;
    let current = null;
    const place = (index) => {
      current = index;
      const at = xs[index];
      const rows = lookup.filter((one) => one.at.has(at)).map((one) => ({ ...one, y: one.at.get(at) }));
      rows.sort((a, b) => (b.y ?? Infinity) - (a.y ?? Infinity));
      cursor.replaceChildren(
        svg("line", { x1: view.x(at), x2: view.x(at), y1: view.box.top, y2: view.box.bottom }),
        ...rows.filter((row) => view.usable(row.y)).map((row) =>
          svg("circle", { class: row.cls, cx: view.x(at), cy: view.y(view.clip(row.y)), r: 4 })));
      const ratio = root.clientWidth / view.width || 1;
      box.show(view.x(at) * ratio, 60, `${view.xName} ${(view.xFormat ?? String)(at)}`, rows.map((row) => ({
        cls: row.cls, name: row.name, value: row.y === null ? "not finite" : (view.read ?? view.format)(row.y) })));
    };
    const leave = () => { current = null; cursor.replaceChildren(); box.hide(); };
    root.addEventListener("pointermove", (event) => {
      const bounds = root.getBoundingClientRect();
      const px = ((event.clientX - bounds.left) * view.width) / bounds.width;
      const share = (px - view.box.left) / (view.box.right - view.box.left);
      const [from, to] = view.range;
      const wanted = view.xLog ? from * (to / from) ** share : from + share * (to - from);
      let [low, high] = [0, xs.length - 1];
      while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < wanted) low = mid + 1; else high = mid; }
      place(low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low);
    });
    root.addEventListener("pointerleave", leave);
    root.addEventListener("blur", leave);
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!step) return;
      event.preventDefault();
      place(current === null ? (step > 0 ? 0 : xs.length - 1) : Math.max(0, Math.min(xs.length - 1, current + step)));
    });
  };

  return lines;
})();
