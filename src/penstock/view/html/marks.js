// The upper canvas of a panel: hovered, selected and found actions, and the critical path.

/** Draw the marks of a panel; while anything is marked, the rest is dimmed by a veil. */
function paintMarks(context, panel, marks, colours) {
  const { lanes } = panel;
  context.setTransform(panel.ratio, 0, 0, panel.ratio, 0, 0);
  context.clearRect(0, 0, lanes.margin + lanes.width + 8, lanes.height);
  context.save();
  context.beginPath();
  context.rect(lanes.margin, 0, lanes.width, lanes.laneHeight);
  context.clip();
  if (marks.range) paintRange(context, panel, marks.range, colours);
  const isLit = marks.lit && ((row) => marks.lit[row]);
  if (isLit || marks.showsCritical) {
    paintVeil(context, panel, colours);
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    panel.eachVisible((row) => {
      if (isLit?.(row) || (marks.showsCritical && panel.isCritical[row])) paintBar(context, panel, row);
    });
  }
  if (marks.showsCritical) paintPath(context, panel, colours);
  if (marks.selected !== NOTHING) {
    paintArrows(context, panel, marks.selected, colours);
    paintOutline(context, panel, marks.selected, colours, 2);
  }
  if (marks.hovered !== NOTHING && marks.hovered !== marks.selected) {
    paintArrows(context, panel, marks.hovered, colours);
    paintOutline(context, panel, marks.hovered, colours, 1.5);
  }
  context.restore();
}

/** Mark the time that is about to fill the window. */
function paintRange(context, { lanes }, [from, to], colours) {
  const [left, right] = [lanes.x(Math.min(from, to)), lanes.x(Math.max(from, to))];
  context.globalAlpha = 0.18;
  context.fillStyle = colours.text.ink;
  context.fillRect(left, 0, right - left, lanes.laneHeight);
  context.globalAlpha = 1;
}

/** Dim the bars, but not the memory curves. */
function paintVeil(context, { lanes, bars }, colours) {
  context.fillStyle = colours.text.veil;
  for (const rank of lanes.visibleRanks) {
    const top = lanes.y(rank - bars.laneHeight / 2, rank);
    context.fillRect(lanes.margin, top, lanes.width, lanes.barStep * bars.laneHeight);
  }
}

/** Draw a line with a halo, so that it is visible on every colour. */
function strokeTwice(context, colours, width) {
  context.lineJoin = "round";
  context.strokeStyle = colours.text.card;
  context.lineWidth = width + 2;
  context.stroke();
  context.strokeStyle = colours.text.ink;
  context.lineWidth = width;
  context.stroke();
}

function paintOutline(context, panel, row, colours, width) {
  const { x, y, width: across, height } = panel.box(row);
  context.beginPath();
  context.rect(x - 0.5, y - 0.5, Math.max(across, 2), height + 1);
  strokeTwice(context, colours, width);
}

/** Draw the critical path from the end of each action to the next, and along narrow ones. */
function paintPath(context, panel, colours) {
  const { lanes, timeline } = panel;
  context.beginPath();
  let [xBefore, yBefore] = [-Infinity, 0];
  for (const row of timeline.critical) {
    const y = lanes.y((panel.bars.top(row) + panel.bars.bottom(row)) / 2, timeline.rank[row]);
    const [from, to] = [lanes.x(timeline.start[row]), lanes.x(timeline.end[row])];
    // Steps of less than half a pixel are invisible.
    if (to < xBefore + 0.5 && y === yBefore) continue;
    if (xBefore === -Infinity) context.moveTo(from, y);
    else context.lineTo(from, y);
    // A wide bar is visibly part of the path, and its number stays readable.
    if (to - from > 12) context.moveTo(to, y);
    else context.lineTo(to, y);
    [xBefore, yBefore] = [to, y];
  }
  strokeTwice(context, colours, 1.5);
}

/** Draw arrows from the dependencies of a row to the row, and from the row to its users. */
function paintArrows(context, panel, row, colours) {
  const { timeline } = panel;
  const waitedFor = timeline.waitedFor(row);
  for (const need of timeline.needs(row)) {
    paintArrow(context, panel, need, row, colours, need === waitedFor ? 2.2 : 1.1);
  }
  for (const user of timeline.users(row)) paintArrow(context, panel, row, user, colours, 1.1);
}

function paintArrow(context, panel, from, to, colours, width) {
  const { lanes, timeline, bars } = panel;
  const middle = (row) => lanes.y((bars.top(row) + bars.bottom(row)) / 2, timeline.rank[row]);
  const [x0, y0] = [lanes.x(timeline.end[from]), middle(from)];
  const [x1, y1] = [lanes.x(timeline.start[to]), middle(to)];
  const bend = Math.max(12, Math.min(60, Math.abs(x1 - x0) / 2));
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  context.moveTo(x1 - 6, y1 - 4);
  context.lineTo(x1, y1);
  context.lineTo(x1 - 6, y1 + 4);
  strokeTwice(context, colours, width);
}
