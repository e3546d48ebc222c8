// The lower canvas of a panel: lanes, bars with numbers, memory, and the axis.

// With more visible bars, columns of pixels replace bars, and numbers are left out.
const MAX_BARS = 6000;
const MAX_NUMBERS = 2500;
const SMALL_FONT = "9.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const DIGIT_WIDTH = 6.6;
const LEAST_LABEL_Y = 6;
// What is left of the colour of kinds that the legend hides.
const HIDDEN_SHARE = 0.12;

function paintPanel(context, panel, colours) {
  const { lanes } = panel;
  context.setTransform(panel.ratio, 0, 0, panel.ratio, 0, 0);
  context.clearRect(0, 0, lanes.margin + lanes.width + 8, lanes.height);
  context.save();
  context.beginPath();
  context.rect(0, 0, lanes.margin + lanes.width, lanes.laneHeight);
  context.clip();
  const count = panel.countVisible();
  panel.showsNumbers = count <= MAX_NUMBERS;
  if (count > MAX_BARS) {
    drawDensity(context, panel, colours);
  } else {
    paintIdle(context, panel, colours);
    paintBars(context, panel, colours);
  }
  if (lanes.memoryStep) paintMemory(context, panel, colours);
  paintLabels(context, lanes, colours);
  context.restore();
  paintAxis(context, lanes, colours);
}

function paintIdle(context, { lanes, bars, timeline }, colours) {
  context.fillStyle = colours.text.idle;
  const from = Math.max(lanes.x(0), lanes.margin);
  const to = Math.min(lanes.x(timeline.seconds), lanes.margin + lanes.width);
  for (const rank of lanes.visibleRanks) {
    const top = lanes.y(rank - bars.laneHeight / 2, rank);
    context.fillRect(from, top, to - from, lanes.barStep * bars.laneHeight);
  }
}

function paintBars(context, panel, colours) {
  const { lanes } = panel;
  context.save();
  context.beginPath();
  context.rect(lanes.margin, 0, lanes.width, lanes.laneHeight);
  context.clip();
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "middle";
  panel.eachVisible((row) => paintBar(context, panel, row));
  if (panel.bars.hasOverlap) paintBorders(context, panel, colours);
  context.restore();
}

/** Draw one bar with its microbatch, slightly narrower than its time to separate neighbours. */
function paintBar(context, panel, row) {
  const { x, y, width, height } = panel.box(row);
  const { fill, ink } = panel.shades.of(row);
  const isHidden = panel.hiddenKinds.has(panel.timeline.kind(row));
  context.fillStyle = fill;
  context.globalAlpha = isHidden ? HIDDEN_SHARE : 1;
  const hair = width > 3 ? Math.min(1, width / 8) : 0;
  context.fillRect(x, y, Math.max(width - hair, 0.3), height - (panel.bars.parts[row] > 1 ? 0.5 : 0));
  context.globalAlpha = 1;
  if (isHidden) return;
  const microbatch = panel.timeline.microbatch[row];
  if (!panel.showsNumbers || microbatch === NOTHING || height < 11) return;
  // The number is centred in the visible part of the bar.
  const { margin, width: shown } = panel.lanes;
  const [left, right] = [Math.max(x, margin), Math.min(x + width, margin + shown)];
  const text = String(microbatch);
  if (right - left < text.length * DIGIT_WIDTH + 3) return;
  context.fillStyle = ink;
  context.fillText(text, (left + right) / 2, y + height / 2 + 0.5);
}

function paintBorders(context, panel, colours) {
  context.strokeStyle = colours.text.ink;
  context.lineWidth = 1;
  panel.eachVisible((row) => {
    if (panel.bars.parts[row] === 1 || panel.bars.part[row] !== 0) return;
    const { x, y, width } = panel.box(row);
    const height = panel.lanes.barStep * panel.bars.laneHeight;
    if (width > 5) context.strokeRect(x + 0.5, y + 0.5, width - 2, height - 1);
  });
}

/** Draw the memory of each rank as a curve below its lane, with the maximum per pixel. */
function paintMemory(context, panel, colours) {
  const { lanes, timeline } = panel;
  const end = lanes.margin + lanes.width;
  context.fillStyle = colours.text.memory;
  for (const rank of lanes.visibleRanks) {
    const bottom = lanes.y(rank + 0.5, rank) + lanes.memoryStep - 5;
    const height = (held) => bottom - (held / timeline.mostMemory) * (lanes.memoryStep - 7);
    context.fillRect(lanes.margin, bottom, lanes.width, 0.5);
    context.beginPath();
    context.moveTo(lanes.margin, bottom);
    let [x, most, last] = [lanes.margin, 0, 0];
    panel.eachLevel(rank, (time, held) => {
      const here = clamp(lanes.x(time), lanes.margin, end);
      if (here >= x + 0.5) {
        context.lineTo(x, height(most));
        context.lineTo(x, height(last));
        context.lineTo(here, height(last));
        [x, most] = [here, held];
      }
      most = time < lanes.window.left ? held : Math.max(most, held);
      last = held;
    });
    context.lineTo(x, height(most));
    context.lineTo(x, height(last));
    context.lineTo(end, height(last));
    context.lineTo(end, bottom);
    context.globalAlpha = 0.6;
    context.fill();
    context.globalAlpha = 1;
    paintScale(context, panel, bottom, colours);
  }
}

/** Write the largest and the smallest value of a memory curve beside it. */
function paintScale(context, { lanes, timeline }, bottom, colours) {
  if (lanes.memoryStep < MEMORY_LIMITS[0]) return;
  context.fillStyle = colours.text.muted;
  context.font = SMALL_FONT;
  context.textBaseline = "middle";
  // A narrow screen has room for the value and its unit above the curve only.
  context.textAlign = lanes.isNarrow ? "left" : "right";
  const x = lanes.isNarrow ? lanes.margin + 2 : lanes.margin - 7;
  const most = shortMemory(timeline.mostMemory, timeline.memoryUnit);
  context.fillText(most, x, bottom - lanes.memoryStep + 11);
  context.fillStyle = colours.text.memory;
}

function paintLabels(context, lanes, colours) {
  context.fillStyle = colours.text.muted;
  context.font = FONT;
  context.textAlign = "right";
  context.textBaseline = "middle";
  // Every second, fourth, ... label if they do not all fit.
  const every = 2 ** Math.max(0, Math.ceil(Math.log2(12 / lanes.step)));
  for (const rank of lanes.visibleRanks) {
    if (rank % every) continue;
    const label = lanes.isNarrow ? String(rank) : `rank ${rank}`;
    // Half of the text of a thin first lane would be above the canvas.
    context.fillText(label, lanes.margin - 7, Math.max(lanes.y(rank, rank), LEAST_LABEL_Y));
  }
}

function paintAxis(context, lanes, colours) {
  const { left, right, span } = lanes.window;
  const top = lanes.laneHeight + 2;
  context.strokeStyle = colours.text.line;
  context.fillStyle = colours.text.muted;
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "top";
  context.beginPath();
  context.moveTo(lanes.margin, top + 0.5);
  context.lineTo(lanes.margin + lanes.width, top + 0.5);
  const step = niceStep((span / lanes.width) * 80);
  for (let tick = Math.ceil(left / step); tick * step <= right; tick++) {
    const x = Math.round(lanes.x(tick * step)) + 0.5;
    context.moveTo(x, top);
    context.lineTo(x, top + 5);
    // The first label names the unit.
    const unit = tick === Math.ceil(left / step) ? " s" : "";
    const label = formatTick(tick * step, step) + unit;
    // Keep the last label on the canvas.
    const rightmost = lanes.margin + lanes.width + 6 - label.length * 3.2;
    context.fillText(label, Math.min(x, rightmost), top + 8);
  }
  context.stroke();
}
