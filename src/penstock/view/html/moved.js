// The difference of timelines: actions that start at another time than in the first one.

/** Return, for a panel, the rows that moved, and the one that moved furthest. */
function findMoved(first, panel) {
  const { timeline } = panel;
  const found = { rows: [], shared: 0, most: NOTHING, seconds: 0 };
  for (const row of panel.bars.rows) {
    const twin = findTwin(timeline, row, first.timeline);
    if (twin === NOTHING) continue;
    found.shared++;
    const seconds = timeline.start[row] - first.timeline.start[twin];
    if (Math.abs(seconds) <= 2 * Math.max(timeline.tick, first.timeline.tick)) continue;
    found.rows.push(row);
    if (Math.abs(seconds) > Math.abs(found.seconds)) [found.most, found.seconds] = [row, seconds];
  }
  return found;
}

/** Say how many actions of a panel moved, and which the most. */
function movedText({ timeline }, { rows, shared, most, seconds }) {
  if (!shared) return `${timeline.title}: has no action in common with the first`;
  if (!rows.length) return `${timeline.title}: nothing moved`;
  const way = seconds > 0 ? "later" : "earlier";
  const furthest = `${actionOnRank(timeline, most)} by ${formatTime(Math.abs(seconds))} s, ${way}`;
  return `${timeline.title}: ${rows.length} of the ${shared} actions in both have moved; the furthest: ${furthest}`;
}
