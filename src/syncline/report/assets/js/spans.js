"use strict";
// The spans of one run: decode the page's columns into typed arrays, and look spans up by time, step and name.
// A row is a stretch [from, to) of the arrays, in the order of starts; `reach` is the latest end so far in the row.
Syncline.spans = (() => {
  const numbers = (packed, count, Kind) => {
    const text = atob(packed);
    const found = new Kind(count);
    let at = 0;
    for (let i = 0; i < count; i += 1) {
      let value = 0;
      let factor = 1;
      let byte = text.charCodeAt(at);
      for (at += 1; byte > 127; at += 1) {
        value += (byte & 127) * factor;
        factor *= 128;
        byte = text.charCodeAt(at);
      }
      found[i] = value + byte * factor;
    }
    return found;
  };

  const decode = (columns) => {
    const count = columns.rows.reduce((sum, row) => sum + row[3], 0);
    const start = numbers(columns.start, count, Float64Array);
    const end = numbers(columns.length, count, Float64Array);
    const kind = numbers(columns.kind, count, Uint32Array);
    const step = numbers(columns.step, count, Float64Array);
    const reach = new Float64Array(count);
    let from = 0;
    const rows = columns.rows.map(([rank, lane, slot, size, track]) => {
      let [time, number, latest] = [0, 0, 0];
      for (let i = from; i < from + size; i += 1) {
        time += start[i];
        number += step[i] % 2 ? -(step[i] + 1) / 2 : step[i] / 2;
        latest = Math.max(latest, time + end[i]);
        start[i] = time;
        end[i] += time;
        step[i] = number;
        reach[i] = latest;
      }
      from += size;
      return { rank, lane: columns.strings[lane], track: columns.strings[track] ?? "", slot, from: from - size, to: from };
    });
    return queries({ count, start, end, kind, step, reach, rows, strings: columns.strings, kinds: columns.kinds, gpu: Boolean(columns.gpu) });
  };

  // The first index of [low, high) for which `past(index)` holds; it must hold for all later indices.
  const first = (low, high, past) => {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (past(middle)) high = middle; else low = middle + 1;
    }
    return low;
  };

  const queries = (set) => {
    const { start, end, kind, step, reach, rows, strings, kinds } = set;
    const ranks = [...new Set(rows.map((row) => row.rank))].sort((a, b) => a - b);
    const reaching = (row, time) => first(row.from, row.to, (i) => reach[i] > time);
    const rowOf = (index) => rows[first(0, rows.length, (i) => rows[i].to > index)];
    const name = (index) => strings[kinds[kind[index] * 3]];
    const unit = (index) => strings[kinds[kind[index] * 3 + 1]];
    const bytes = (index) => kinds[kind[index] * 3 + 2];
    let [begin, last] = [Infinity, 0];
    for (const row of rows) {
      begin = Math.min(begin, start[row.from]);
      last = Math.max(last, reach[row.to - 1]);
    }
    const bounds = stepBounds(set);
    return { ...set, ranks, reaching, rowOf, name, unit, bytes, begin: Number.isFinite(begin) ? begin : 0, end_: last, ...bounds };
  };

  // Start and end of each step, over all ranks and for each rank: from the step spans, or from all spans if there are none.
  const stepBounds = ({ start, end, step, rows }) => {
    const bracketed = rows.some((row) => row.lane === "step");
    const whole = new Map();
    const own = new Map();
    for (const row of rows) {
      if (bracketed && row.lane !== "step") continue;
      for (let i = row.from; i < row.to; i += 1) {
        if (step[i] < 0) continue;
        for (const [table, key] of [[whole, step[i]], [own, `${row.rank} ${step[i]}`]]) {
          const known = table.get(key);
          if (!known) table.set(key, { from: start[i], to: end[i] });
          else { known.from = Math.min(known.from, start[i]); known.to = Math.max(known.to, end[i]); }
        }
      }
    }
    const steps = [...whole.keys()].sort((a, b) => a - b);
    const stepOf = (number, rank) => (rank === undefined ? whole.get(number) : own.get(`${rank} ${number}`)) ?? null;
    // The steady step of median length, which the page shows first.
    const typical = (steady) => {
      // Not the last step: work that it leaves to the next step would not be visible.
      const later = steps.slice(0, -1).filter((number) => number >= steady);
      const known = later.length ? later : steps;
      const sorted = [...known].sort((a, b) => whole.get(a).to - whole.get(a).from - (whole.get(b).to - whole.get(b).from));
      return sorted.length ? sorted[sorted.length >> 1] : null;
    };
    const nearest = (asked) => steps.reduce((best, one) => (Math.abs(one - asked) < Math.abs(best - asked) ? one : best), steps[0]);
    return { steps, stepOf, typical, nearest };
  };

  const read = (number) => {
    const data = JSON.parse(document.getElementById(`trace-${number}`).textContent);
    return { ...data, set: decode(data.spans), spans: null };
  };
  const cache = new Map();
  const trace = (number) => {
    if (!cache.has(number)) cache.set(number, read(number));
    return cache.get(number);
  };

  return { decode, first, trace };
})();
