"use strict";
// The exclusive partition along time: on each rank every moment of a step belongs to one phase, compute first. This is
// the rule of the analysis; here it gives the first row of a rank, and how much of a span is hidden behind compute.
Syncline.phases = (() => {
  const { first } = Syncline.spans;
  const PRIORITY = ["forward", "backward", "update", "data", "between", "encode", "decode", "exchange", "wait", "step"];
  const PHASE = ["forward", "backward", "update", "data", "between", "exposed_encode", "exposed_encode", "exposed_exchange", "wait", "other"];
  // Lanes of the training thread's own work hide the others. On a GPU, the host's lanes (data, between) come last.
  const COVER = (set) => (set.gpu ? 3 : 5);
  const ORDER = (set) => (set.gpu ? [0, 1, 2, 5, 6, 7, 8, 3, 4, 9] : PRIORITY.map((_, place) => place));
  const CODES = 32;
  const HIDEABLE = new Set(["exchange", "encode", "decode", "wait"]);

  const sweep = (set, rows) => {
    const spans = rows.filter((row) => PRIORITY.includes(row.lane));
    const edges = new Float64Array(2 * spans.reduce((sum, row) => sum + row.to - row.from, 0));
    let at = 0;
    for (const row of spans) {
      const code = PRIORITY.indexOf(row.lane) * 2;
      for (let i = row.from; i < row.to; i += 1) {
        edges[at] = set.start[i] * CODES + code + 1;
        edges[at + 1] = set.end[i] * CODES + code;
        at += 2;
      }
    }
    edges.sort();
    const order = ORDER(set);
    const bracketed = spans.some((row) => row.lane === "step");
    const active = new Int32Array(PRIORITY.length);
    const [start, end, phase] = [[], [], []];
    let time = 0;
    let current = -1;
    for (const edge of edges) {
      const moment = Math.floor(edge / CODES);
      const code = edge - moment * CODES;
      if (moment > time && current >= 0) {
        const last = phase.length - 1;
        if (last >= 0 && phase[last] === current && end[last] === time) end[last] = moment;
        else { start.push(time); end.push(moment); phase.push(current); }
      }
      time = moment;
      active[code >> 1] += code & 1 ? 1 : -1;
      // Time outside all steps belongs to no phase.
      current = bracketed && active[PRIORITY.length - 1] <= 0 ? -1 : order.find((place) => active[place] > 0) ?? -1;
    }
    return { start: Float64Array.from(start), end: Float64Array.from(end), phase: Uint8Array.from(phase) };
  };

  // Intervals in which compute runs, merged where they touch, with the total compute time before each.
  const covered = (set, rows) => {
    const pieces = rows.filter((row) => PRIORITY.indexOf(row.lane) >= 0 && PRIORITY.indexOf(row.lane) < COVER(set));
    const order = [];
    for (const row of pieces) for (let i = row.from; i < row.to; i += 1) order.push(i);
    order.sort((a, b) => set.start[a] - set.start[b]);
    const [start, end, before] = [[], [], []];
    let sum = 0;
    for (const i of order) {
      const last = end.length - 1;
      if (last >= 0 && set.start[i] <= end[last]) {
        if (set.end[i] > end[last]) { sum += set.end[i] - end[last]; end[last] = set.end[i]; }
      } else if (set.end[i] > set.start[i]) {
        before.push(sum);
        start.push(set.start[i]);
        end.push(set.end[i]);
        sum += set.end[i] - set.start[i];
      }
    }
    const until = (time) => {
      const index = first(0, start.length, (i) => start[i] > time) - 1;
      return index < 0 ? 0 : before[index] + Math.min(time, end[index]) - start[index];
    };
    return { start, end, hidden: (from, to) => until(to) - until(from) };
  };

  const of = (set) => {
    const safe = set.end_ * CODES < Number.MAX_SAFE_INTEGER;
    const byRank = new Map(set.ranks.map((rank) => [rank, []]));
    for (const row of set.rows) byRank.get(row.rank).push(row);
    return new Map([...byRank].map(([rank, rows]) => {
      return [rank, { ...(safe ? sweep(set, rows) : { start: [], end: [], phase: [] }), cover: covered(set, rows) }];
    }));
  };

  return { of, PHASE, HIDEABLE };
})();
