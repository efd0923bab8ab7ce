"use strict";
// Search by name: the matching spans in order of time, and moving from one match to the next.
Syncline.finder = (() => {
  const of = (set) => {
    const lower = set.strings.map((text) => text.toLowerCase());
    const state = { marks: null, hits: new Uint32Array(0), at: -1, query: "" };

    const search = (query) => {
      const wanted = query.trim().toLowerCase();
      state.query = wanted;
      state.at = -1;
      if (!wanted) { state.marks = null; state.hits = new Uint32Array(0); return; }
      const matching = lower.map((text) => text.includes(wanted));
      const marks = new Uint8Array(set.kinds.length / 3);
      for (let k = 0; k < marks.length; k += 1) marks[k] = matching[set.kinds[k * 3]] || matching[set.kinds[k * 3 + 1]] ? 1 : 0;
      const hits = [];
      for (const row of set.rows) {
        if (row.lane === "step") continue;
        for (let i = row.from; i < row.to; i += 1) if (marks[set.kind[i]]) hits.push(i);
      }
      state.marks = marks;
      state.hits = Uint32Array.from(hits).sort((a, b) => set.start[a] - set.start[b]);
    };

    // Move to the next match; the first call moves to the first match at or after `time`.
    const walk = (by, time) => {
      const many = state.hits.length;
      if (!many) return null;
      if (state.at < 0) {
        const behind = Syncline.spans.first(0, many, (n) => set.start[state.hits[n]] >= time);
        state.at = by > 0 ? behind % many : (behind - 1 + many) % many;
      } else state.at = (state.at + by + many) % many;
      return state.hits[state.at];
    };

    const summary = () => {
      if (!state.query) return "";
      if (!state.hits.length) return "no match";
      const all = state.hits.length.toLocaleString("en");
      return state.at < 0 ? `${all} found` : `${(state.at + 1).toLocaleString("en")} of ${all}`;
    };

    return { state, search, walk, summary };
  };

  return { of };
})();
