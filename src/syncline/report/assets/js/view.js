"use strict";
// The part of time that a timeline shows. It stays within the trace and is never shorter than a microsecond.
Syncline.view = (() => {
  const LEAST = 1000;

  const of = (set, changed) => {
    const margin = Math.max((set.end_ - set.begin) * 0.01, LEAST);
    const [low, high] = [set.begin - margin, set.end_ + margin];
    const state = { from: low, to: high };

    const show = (from, to) => {
      const width = Math.min(Math.max(to - from, LEAST), high - low);
      const begin = Math.min(Math.max((from + to - width) / 2, low), high - width);
      if (begin === state.from && begin + width === state.to) return;
      [state.from, state.to] = [begin, begin + width];
      changed();
    };
    const zoom = (factor, at = (state.from + state.to) / 2) => {
      const width = Math.min(Math.max((state.to - state.from) * factor, LEAST), high - low);
      const share = (at - state.from) / (state.to - state.from);
      show(at - share * width, at + (1 - share) * width);
    };
    const move = (share) => {
      const by = (state.to - state.from) * share;
      const held = by < 0 ? Math.max(by, low - state.from) : Math.min(by, high - state.to);
      show(state.from + held, state.to + held);
    };
    const fit = ({ from, to }) => show(from - (to - from) * 0.015, to + (to - from) * 0.015);

    return { state, show, zoom, move, fit, all: () => show(low, high) };
  };

  return { of };
})();
