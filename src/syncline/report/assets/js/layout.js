"use strict";
// Position of each row: one group per rank, with its partition on top, then one track per lane, process group and
// stream, with sub-rows for overlaps.
Syncline.layout = (() => {
  const HEAD = 18;
  const GAP = 10;
  const ONE = 15;

  const rowHeight = (count) => (count === 1 ? ONE : count <= 3 ? 11 : count <= 6 ? 8 : 6);

  // Returns {groups: [{rank, y, head, folded, tracks: [{lane, label, y, height, row: [{row, y, height}]}]}], height}.
  const of = (set, { ranks = set.ranks, folded = new Set(), top = 0 } = {}) => {
    let y = top;
    const byRank = new Map(ranks.map((rank) => [rank, []]));
    for (const row of set.rows) byRank.get(row.rank)?.push(row);
    const groups = ranks.map((rank) => {
      const group = { rank, y, head: HEAD, folded: folded.has(rank), tracks: [] };
      y += HEAD + 2;
      if (!group.folded) {
        const tracks = new Map();
        for (const row of byRank.get(rank)) {
          const label = row.track ? `${row.lane}, ${row.track}` : row.lane;
          tracks.set(label, [...(tracks.get(label) ?? []), row]);
        }
        for (const [label, rows] of tracks) {
          const height = rowHeight(rows.length);
          group.tracks.push({ lane: rows[0].lane, label, y, height: height * rows.length, rows: rows.map((row, i) => ({ row, y: y + i * height, height: height - 1 })) });
          y += height * rows.length + 2;
        }
      }
      group.height = y - group.y;
      y += group.folded ? 3 : GAP;
      return group;
    });
    return { groups, height: y };
  };

  // The group at a height, and its track and row if there is one.
  const at = (layout, y) => {
    const group = layout.groups.find((one) => y >= one.y && y < one.y + one.height);
    const track = group?.tracks.find((one) => y >= one.y && y < one.y + one.height);
    const line = track?.rows.find((one) => y >= one.y && y < one.y + one.height + 1);
    return { group, track, row: line?.row };
  };

  // Where a span is drawn; null if its rank is folded.
  const place = (layout, row) => {
    for (const group of layout.groups) for (const track of group.tracks) for (const line of track.rows) if (line.row === row) return line;
    return null;
  };

  return { of, at, place, HEAD };
})();
