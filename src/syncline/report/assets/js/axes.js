"use strict";
// Scales and axes: round ticks on linear and logarithmic scales, gridlines, labels that do not collide.
Syncline.axes = (() => {
  const { svg } = Syncline;

  const ticks = (low, high, count) => {
    const raw = (high - low) / Math.max(count, 1);
    if (!(raw > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
    return found;
  };

  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
    }
    const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    const decades = inside.filter((value) => /^[^1-9]*10*$/.test(String(value)));
    return inside.length > 8 && decades.length > 1 ? decades : inside;
  };

  const scale = (low, high, from, to, log) => {
    const map = log ? Math.log : (value) => value;
    const [a, b] = [map(low), map(high)];
    return (value) => from + ((map(value) - a) / (b - a || 1)) * (to - from);
  };

  // Draws both axes into `root` and returns the scales. `range` is {x: [low, high], y: [low, high]}.
  const frame = (root, { width, height, range, log = false, xLog = false, xTicks = null, xName, xFormat = String, format }) => {
    const yTicks = log ? logTicks(...range.y) : ticks(...range.y, height / 55);
    const labels = yTicks.map(format);
    const left = 14 + 6.6 * Math.max(...labels.map((label) => label.length), 2);
    const box = { left, right: width - 14, top: 10, bottom: height - 36 };
    const x = scale(...range.x, box.left, box.right, xLog);
    const y = scale(...range.y, box.bottom, box.top, log);
    const grid = svg("g", { class: "grid" });
    yTicks.forEach((tick, i) => grid.append(
      svg("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: box.left - 7, y: y(tick) + 4, "text-anchor": "end" }, labels[i])));
    const marks = xTicks ?? ticks(...range.x, Math.min(10, width / 80)).filter(Number.isInteger);
    for (const tick of marks) {
      const label = xFormat(tick);
      // A label that is wider than the room beside its tick ends at the edge of the plot.
      const half = label.length * 3.3;
      grid.append(svg("text", { x: Math.min(x(tick), width - half - 2), y: box.bottom + 17, "text-anchor": "middle" }, label));
    }
    grid.append(
      svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      svg("text", { class: "axis", x: box.right, y: box.bottom + 32, "text-anchor": "end" }, xName));
    root.append(grid);
    return { x, y, box };
  };

  return { ticks, logTicks, scale, frame };
})();
