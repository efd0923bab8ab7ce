"use strict";
// Details of a span: find the span under the pointer, describe it as (name, value) pairs, and find its peers (the spans
// of the same exchange on the other ranks).
Syncline.inspect = (() => {
  const { text, html, layout: layouts } = Syncline;
  const NEAR = 3; // largest distance in pixels from the pointer to a span

  // The span of `row` at a time, or the nearest within `slack`; and how many there are within a pixel of it.
  const under = (set, row, time, slack) => {
    let [best, miss, count] = [-1, Infinity, 0];
    for (let i = set.reaching(row, time - slack); i < row.to && set.start[i] <= time + slack; i += 1) {
      if (set.end[i] < time - slack) continue;
      const off = Math.max(set.start[i] - time, time - set.end[i], 0);
      if (Math.abs((set.start[i] + set.end[i]) / 2 - time) < slack / NEAR) count += 1;
      if (off < miss || (off === miss && set.end[i] - set.start[i] < set.end[best] - set.start[best])) [best, miss] = [i, off];
    }
    return best < 0 ? null : { index: best, count };
  };

  // How much of it is hidden behind compute of the same rank, in ns; null for lanes that cannot be hidden.
  const hidden = (set, parts, index) => {
    const row = set.rowOf(index);
    return Syncline.phases.HIDEABLE.has(row.lane) ? parts.get(row.rank).cover.hidden(set.start[index], set.end[index]) : null;
  };

  const describe = (set, parts, index) => {
    const row = set.rowOf(index);
    const length = set.end[index] - set.start[index];
    const bytes = set.bytes(index);
    const veiled = hidden(set, parts, index);
    const step = set.step[index] >= 0 ? set.stepOf(set.step[index], row.rank) ?? set.stepOf(set.step[index]) : null;
    const pairs = [["rank", String(row.rank)], ["lane", row.lane], ["track", row.track], ["name", set.name(index)], ["unit", set.unit(index)],
      ["step", set.step[index] >= 0 ? String(set.step[index]) : "none"], ["duration", text.time(length)]];
    if (step && row.lane !== "step") pairs.push(["from its start", text.time(set.start[index] - step.from)]);
    if (bytes) pairs.push(["bytes", text.size(bytes)]);
    if (bytes && length > 0 && row.lane === "exchange") pairs.push(["bandwidth", text.bandwidth((bytes * 8e9) / length)]);
    if (veiled !== null && length > 0) {
      pairs.push(["exposed", veiled >= length ? "no: all hidden" : veiled <= 0 ? "all of it" : `${text.time(length - veiled)} (${text.percent(1 - veiled / length)})`]);
    }
    return pairs.filter(([, value]) => value !== "");
  };

  // The same exchange on every rank: when each rank joined it, and when it ended.
  const peers = (set, index) => {
    const own = set.rowOf(index);
    if (own.lane !== "exchange" && own.lane !== "wait") return [];
    const [name, unit, step] = [set.name(index), set.unit(index), set.step[index]];
    const found = new Map();
    const [from, to] = [set.start[index], set.end[index]];
    for (const row of set.rows) {
      if (row.lane !== "exchange" && row.lane !== "wait") continue;
      for (let i = set.reaching(row, from - 5e9); i < row.to && set.start[i] < to + 5e9; i += 1) {
        if (Math.abs(set.step[i] - step) > 1 || set.name(i) !== name || set.unit(i) !== unit) continue;
        const off = Math.max(set.start[i] - to, from - set.end[i], 0);
        // Where steps overlap, ranks may assign an exchange to different steps: then compare times.
        if (set.step[i] !== step && off > 0) continue;
        const known = found.get(row.rank);
        if (known && known.off < off) continue;
        if (known && known.off === off) known.spans.push(i);
        else found.set(row.rank, { rank: row.rank, off, spans: [i] });
      }
    }
    return [...found.values()].map(({ rank, spans }) => ({
      rank, spans, from: Math.min(...spans.map((i) => set.start[i])), to: Math.max(...spans.map((i) => set.end[i])) }))
      .sort((a, b) => a.rank - b.rank);
  };

  // The details of a pinned span, and when each rank joined its exchange.
  const details = (box, set, parts, index, close) => {
    if (index === null) { box.hidden = true; box.replaceChildren(); return; }
    const pairs = describe(set, parts, index);
    const button = html("button", { type: "button", "aria-label": "let go of this span" }, "×");
    button.addEventListener("click", close);
    const together = peers(set, index);
    const list = html("dl", {}, pairs.map(([key, value]) => html("div", {}, html("dt", {}, key), html("dd", {}, html("bdi", {}, value)))));
    box.replaceChildren(button, list);
    if (together.length > 1) {
      const early = Math.min(...together.map((one) => one.from));
      const last = together.reduce((a, b) => (b.from > a.from ? b : a));
      box.append(html("p", {}, `On ${together.length} ranks. Straggler: rank ${last.rank}, ${text.time(last.from - early)} after the first. `,
        together.slice(0, 16).map((one) => html("span", { class: one === last ? "late" : "peer" },
          `rank ${one.rank} +${text.time(one.from - early)}, done +${text.time(one.to - early)}`))));
    }
    box.hidden = false;
  };

  // The read-out for a hovered span.
  const tip = (set, parts, { index, count }) => {
    const row = set.rowOf(index);
    const pairs = describe(set, parts, index).filter(([key]) => key !== "rank" && key !== "lane" && key !== "step");
    const rows = pairs.map(([name, value]) => ({ cls: name === "name" ? `l-${row.lane}` : "none", name, value }));
    if (count > 1) rows.push({ cls: "none", name: "here", value: `${count} spans: zoom in` });
    return [`rank ${row.rank}, ${row.lane}${set.step[index] >= 0 ? `, step ${set.step[index]}` : ""}`, rows];
  };

  const frames = (brush, set, layout, index, colours) => {
    for (const one of peers(set, index)) {
      for (const i of one.spans) {
        const line = layouts.place(layout, set.rowOf(i));
        if (line && i !== index) Syncline.paint.frame(brush, set, i, line, colours.soft);
      }
    }
    const line = layouts.place(layout, set.rowOf(index));
    if (line) Syncline.paint.frame(brush, set, index, line, colours.ink);
  };

  return { under, hidden, describe, details, tip, frames, NEAR };
})();
