// Many bars in few pixels: each column of a lane gets the mean colour of its bars.

/** Draw the lanes as one small image, one line of pixels each (two with overlaps). */
function drawDensity(context, panel, colours) {
  const { lanes, bars } = panel;
  const columns = Math.max(1, Math.round(lanes.width * panel.ratio));
  const lines = bars.hasOverlap ? 2 : 1;
  const numLanes = lanes.endRank - lanes.firstRank;
  const image = new ImageData(columns, numLanes * lines);
  const sums = new Float32Array(4 * columns);
  for (let lane = 0; lane < numLanes; lane++) {
    for (let line = 0; line < lines; line++) {
      sums.fill(0);
      sumLine(panel, lanes.firstRank + lane, lines === 2 ? line : NOTHING, sums, columns);
      writeLine(image.data, (lane * lines + line) * columns * 4, sums, colours.idle);
    }
  }
  const canvas = new OffscreenCanvas(columns, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  const height = (lanes.barStep * bars.laneHeight) / lines;
  for (let row = 0; row < image.height; row++) {
    const rank = lanes.firstRank + Math.floor(row / lines);
    const top = lanes.y(rank - bars.laneHeight / 2, rank) + (row % lines) * height;
    context.drawImage(canvas, 0, row, columns, 1, lanes.margin, top, lanes.width, height);
  }
}

/** Sum colours weighted by the share of each column they cover; the fourth value is the share. */
function sumLine({ bars, lanes, shades }, rank, half, sums, columns) {
  const { timeline } = bars;
  const { left, right, span } = lanes.window;
  const scale = columns / span;
  const [from, to] = bars.between(rank, left, right);
  for (let bar = from; bar < to; bar++) {
    const row = bars.rows[bar];
    const parts = bars.parts[row];
    if (half !== NOTHING && parts > 1 && Math.floor((2 * bars.part[row]) / parts) !== half) continue;
    const begin = Math.max((timeline.start[row] - left) * scale, 0);
    const end = Math.min((timeline.end[row] - left) * scale, columns);
    const [red, green, blue] = shades.of(row).channels;
    for (let column = Math.floor(begin); column < end; column++) {
      const share = Math.min(end, column + 1) - Math.max(begin, column);
      const at = 4 * column;
      sums[at] += red * share;
      sums[at + 1] += green * share;
      sums[at + 2] += blue * share;
      sums[at + 3] += share;
    }
  }
}

function writeLine(pixels, at, sums, idle) {
  for (let from = 0; from < sums.length; from += 4) {
    const rest = Math.max(0, 1 - sums[from + 3]);
    const whole = Math.max(1, sums[from + 3]);
    for (let channel = 0; channel < 3; channel++) {
      pixels[at + from + channel] = (sums[from + channel] + idle[channel] * rest) / whole;
    }
    pixels[at + from + 3] = 255;
  }
}
