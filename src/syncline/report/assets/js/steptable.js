"use strict";
// A step as text: time of each rank in each lane, and its exchanges one by one. The alternative to the canvas.
Syncline.steptable = (() => {
  const { html, text, inspect } = Syncline;
  const MOST = 300;

  const table = (caption, heads, rows) => html("table", {}, html("caption", {}, caption),
    html("thead", {}, html("tr", {}, heads.map((head) => html("th", { scope: "col" }, head)))),
    html("tbody", {}, rows.map((cells) => html("tr", {}, cells.map((cell, i) => html(i ? "td" : "th", i ? {} : { scope: "row" }, html("bdi", {}, cell)))))));

  const lanes = (set, parts, step) => {
    const rows = [];
    const found = new Map();
    for (const row of set.rows) {
      const key = `${row.rank} ${row.lane}`;
      const sum = found.get(key) ?? { rank: row.rank, lane: row.lane, count: 0, time: 0, exposed: 0, bytes: 0 };
      each(set, row, step, (i) => {
        const length = set.end[i] - set.start[i];
        sum.count += 1;
        sum.time += length;
        sum.bytes += set.bytes(i);
        sum.exposed += length - (inspect.hidden(set, parts, i) ?? 0);
      });
      found.set(key, sum);
    }
    for (const { rank, lane, count, time, exposed, bytes } of found.values()) {
      if (count) rows.push([`rank ${rank}`, lane, String(count), text.time(time), lane === "step" ? "-" : text.time(exposed), bytes ? text.size(bytes) : "-"]);
    }
    return rows;
  };

  const each = (set, row, step, action) => {
    const bounds = set.stepOf(step);
    // Spans of a step may begin before it and end after it, but not by more than one step.
    const length = bounds.to - bounds.from;
    for (let i = set.reaching(row, bounds.from - length); i < row.to && set.start[i] < bounds.to + length; i += 1) {
      if (set.step[i] === step) action(i);
    }
  };

  const exchanges = (set, parts, step) => {
    const found = [];
    for (const row of set.rows) {
      if (row.lane === "exchange") each(set, row, step, (i) => found.push(i));
    }
    found.sort((a, b) => set.start[a] - set.start[b]);
    return [found.length, found.slice(0, MOST).map((i) => {
      const facts = new Map(inspect.describe(set, parts, i));
      return [`rank ${facts.get("rank")}`, facts.get("unit") ?? facts.get("name") ?? "-", facts.get("from its start") ?? "-", facts.get("duration"),
        facts.get("bytes") ?? "-", facts.get("bandwidth") ?? "-", facts.get("exposed") ?? "-"];
    })];
  };

  const fill = (box, set, parts, step) => {
    if (step === null || !set.stepOf(step)) { box.replaceChildren(html("p", { class: "empty" }, "The trace has no steps.")); return; }
    const [many, rows] = exchanges(set, parts, step);
    box.replaceChildren(
      table(`Step ${step}: lanes; overlapping spans all count`, ["rank", "lane", "spans", "time", "exposed", "bytes"], lanes(set, parts, step)),
      rows.length ? table(`Step ${step}: ${many > rows.length ? `the first ${rows.length} of ${many} exchanges` : "exchanges"}`,
        ["rank", "unit", "from the step's start", "time", "bytes", "bandwidth", "exposed"], rows) : "");
  };

  return { fill };
})();
