"use strict";
// The charts of a benchmark's page, as its data describes them: lines over one x axis, or a bar for each contestant.
(() => {
  const { data, hidden, text, legend, lines, bars, chart, colorClass, pair } = Syncline;
  const format = { ...text, number: (value) => text.significant(value), count: String };

  const drawLines = (plot, figure, { plot: area, width }) => {
    if (plot.legend) legend(figure, [...new Set(plot.series.map(({ run }) => run))]);
    const series = plot.series.filter(({ run }) => !hidden.has(run)).map(({ run, cls, points }) => ({
      cls: cls ?? colorClass(data.runs[run].color), name: data.runs[run].label, dots: points.length < 12, points }));
    lines(area, series, {
      width, height: plot.height, log: plot.y.log, zero: plot.y.zero, yRange: plot.y.range, cap: plot.cap, title: plot.title, format: format[plot.y.format],
      xName: plot.x.name, xLog: plot.x.log, xTicks: plot.x.ticks, xFormat: format[plot.x.format], xMark: plot.mark });
  };

  const drawBars = (plot, figure, { plot: area, width }) => {
    const rows = plot.rows.map(({ color, label, note, value, range, tick }) => ({
      color, label, note, tick, range, pieces: [{ cls: colorClass(color), value, rows: [{ cls: colorClass(color), name: "median", value: note }] }] }));
    bars(area, rows, { width, top: Math.max(...plot.rows.map(({ range, value }) => Math.max(value, ...range))), title: plot.title });
  };

  const kinds = { lines: drawLines, bars: drawBars };
  for (const plot of data.plots) chart(plot.id, (figure, view) => kinds[plot.kind](plot, figure, view));

  const two = document.getElementById("two");
  if (two) pair.open(two, data.pair.map((label, number) => ({ label, number })));
})();
