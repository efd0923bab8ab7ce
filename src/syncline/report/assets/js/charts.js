"use strict";
// The charts of the report: which figures each chart shows.
(() => {
  const { data, shown, text, legend, lines, bars, chart, colorClass } = Syncline;
  const caption = (figure) => figure.querySelector("figcaption").textContent;
  const having = (test) => data.runs.map((run, index) => index).filter((index) => test(data.runs[index]));
  const quantile = (values, q) => values.slice().sort((a, b) => a - b)[Math.floor(q * (values.length - 1))];

  chart("loss", (figure, { plot, width, option }) => {
    legend(figure, having((run) => run.loss.length));
    const series = shown().filter(({ run }) => run.loss.length).map(({ run }) => ({
      cls: colorClass(run.color), name: run.label, points: run.loss.map((loss, i) => [i + 1, loss]) }));
    lines(plot, series, { width, log: option === "log", xName: "iteration", title: caption(figure),
      format: (value) => text.significant(value), read: (value) => text.significant(value, 5) });
  });

  for (const { id, series } of data.shapes ?? []) {
    chart(id, (figure, { plot, width }) => {
      figure.querySelector(".legend").replaceChildren(...series.map(({ name, cls }) => Syncline.html("span", { class: "chip" },
        Syncline.html("span", { class: `swatch ${cls}` }), Syncline.html("bdi", {}, name))));
      lines(plot, series, { width, height: 220, zero: true, xName: "seconds", title: caption(figure), format: String });
    });
  }

  chart("time", (figure, { plot, width, option }) => {
    legend(figure, having((run) => run.times.length));
    const runs = shown().filter(({ run }) => run.times.length);
    const series = runs.map(({ run }) => ({
      cls: colorClass(run.color), name: run.label, marks: [[1, run.times[0]]],
      points: run.times.slice(1).map((ms, i) => [i + 2, ms]) }));
    // The axis covers the steady state; rare spikes and first steps may be beyond it.
    const cap = Math.max(...runs.map(({ run }) => {
      const steady = run.times.slice(1).filter((ms) => ms !== null);
      return steady.length ? Math.min(Math.max(...steady), 2 * quantile(steady, 0.95)) : 0;
    }));
    lines(plot, series, { width, log: option === "log", zero: true, cap, xName: "iteration", title: caption(figure),
      format: (value) => text.significant(value), read: text.duration });
  });

  chart("shares", (figure, { plot, width, option }) => {
    legend(figure, having((run) => run.shares));
    const runs = shown().filter(({ run }) => run.shares);
    const inTime = option === "milliseconds";
    const values = (run) => (inTime ? run.ms : run.shares);
    const total = (run) => Object.values(values(run)).reduce((sum, value) => sum + value, 0);
    bars(plot, runs.map(({ run }) => ({
      color: run.color, label: run.label, note: text.duration(run.median ?? 0),
      pieces: data.parts.filter(({ key }) => values(run)[key] > 0).map(({ key, name }) => ({
        cls: `p-${key}`, value: values(run)[key], inside: inTime ? text.significant(run.ms[key]) : text.percent(run.shares[key]),
        rows: [{ cls: `p-${key}`, name, value: `${text.duration(run.ms[key])}, ${text.percent(run.shares[key])}` }],
      })),
    })), { width, top: Math.max(...runs.map(({ run }) => total(run))), title: caption(figure) });
  });

  chart("wire", (figure, { plot, width }) => {
    const moves = (run) => run.wire.bytes !== null || run.wire.theory !== null;
    legend(figure, having(moves));
    const runs = shown().filter(({ run }) => moves(run));
    bars(plot, runs.map(({ run }) => {
      const { bytes, theory, formula, measured } = run.wire;
      const moved = bytes ?? theory ?? 0;
      const says = theory ? `${formula ? `${formula} = ` : ""}${text.size(theory)}` : "";
      const note = moved === 0 ? "nothing" : measured && theory ? `${text.size(moved)}, ${moved < 2 * theory ? text.percent(moved / theory) : text.times(moved / theory)} of ${says}` : says || text.size(moved);
      const rows = [{ cls: colorClass(run.color), name: measured ? "counted" : "formula", value: text.size(moved) }];
      if (measured && theory) rows.push({ cls: "theory", name: formula || "theory", value: text.size(theory) });
      return { color: run.color, label: run.label, note, tick: theory, pieces: [{ cls: `${colorClass(run.color)}${measured ? "" : " hollow"}`, value: moved, rows }] };
    }), { width, top: Math.max(...runs.map(({ run }) => Math.max(run.wire.bytes ?? 0, run.wire.theory ?? 0))), title: caption(figure) });
  });

  const scaling = (key, options) => (figure, { plot, width }) => {
    const sizes = [...new Set(data.curves.flatMap((curve) => curve.points.map(({ n }) => n)))].sort((a, b) => a - b);
    const series = data.curves.map((curve) => ({
      cls: colorClass(curve.color), name: curve.strategy, dots: true, points: curve.points.map((point) => [point.n, point[key]]) }));
    if (data.curves.length > 1) {
      figure.querySelector(".legend").replaceChildren(...data.curves.map((curve) => Syncline.html("span", { class: "chip" },
        Syncline.html("span", { class: `swatch ${colorClass(curve.color)}` }), Syncline.html("bdi", {}, curve.strategy))));
    }
    lines(plot, [...options.extra(sizes), ...series], { width, height: 280, zero: true, xTicks: sizes, xName: "ranks", title: caption(figure), ...options });
  };
  chart("speedup", scaling("speedup", {
    format: (value) => `${text.significant(value)}x`, read: text.times,
    extra: (sizes) => [
      { cls: "ideal", name: "ideal", quiet: true, points: sizes.map((n) => [n, n / sizes[0]]) },
      ...data.curves.filter((curve) => curve.points.some(({ whole }) => whole !== null)).map((curve) => ({
        cls: colorClass(curve.color), name: `${curve.strategy}, whole run`, dashed: true, dots: true,
        points: curve.points.map(({ n, whole }) => [n, whole]) })),
    ],
  }));
  chart("efficiency", scaling("efficiency", {
    format: text.percent, extra: (sizes) => [{ cls: "ideal", name: "ideal", quiet: true, points: sizes.map((n) => [n, 1]) }] }));
})();
