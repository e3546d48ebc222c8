// Many bars in few pixels: each column of a lane is divided among the kinds that run in it.

// The pixels of a column, top to bottom; a lane has this many lines, or as many as it is high.
const MOST_LINES = 24;

/** Draw the lanes as one small image. Where several bars share a column, each has its share of it. */
function drawDensity(context, panel, colours) {
  const { lanes, bars } = panel;
  const columns = Math.max(1, Math.round(lanes.width * panel.ratio));
  const height = lanes.barStep * bars.laneHeight;
  const lines = clamp(Math.round(height * panel.ratio), 1, MOST_LINES);
  const ranks = lanes.visibleRanks;
  const numLanes = ranks.length;
  const image = new ImageData(columns, numLanes * lines);
  const palette = new Palette(panel);
  const shares = new Float32Array(palette.size * columns);
  for (let lane = 0; lane < numLanes; lane++) {
    shares.fill(0);
    addShares(panel, ranks[lane], shares, columns, palette);
    for (let column = 0; column < columns; column++) {
      const from = column * palette.size;
      const pixels = { data: image.data, at: (lane * lines * columns + column) * 4, next: columns * 4 };
      fillColumn(pixels, lines, shares.subarray(from, from + palette.size), palette, colours.idle);
    }
  }
  const canvas = new OffscreenCanvas(columns, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (let lane = 0; lane < numLanes; lane++) {
    const rank = ranks[lane];
    const top = lanes.y(rank - bars.laneHeight / 2, rank);
    context.drawImage(canvas, 0, lane * lines, columns, lines, lanes.margin, top, lanes.width, height);
  }
}

/** The colours of a panel by number, kind after kind. */
class Palette {
  constructor({ shades, hiddenKinds }) {
    this.size = shades.table.length * shades.table[0].length;
    this.numStages = shades.table[0].length;
    this.channels = shades.table.flat().map(({ channels }) => channels);
    this.isHidden = shades.table.flatMap((fills, kind) => fills.map(() => hiddenKinds.has(kind)));
  }
}

/** Add what each colour covers of each column of a lane. */
function addShares({ bars, lanes }, rank, shares, columns, palette) {
  const { timeline } = bars;
  const { left, right, span } = lanes.window;
  const scale = columns / span;
  const [from, to] = bars.between(rank, left, right);
  for (let bar = from; bar < to; bar++) {
    const row = bars.rows[bar];
    const number = timeline.kind(row) * palette.numStages + timeline.localStageOf[timeline.stage(row)];
    if (palette.isHidden[number]) continue;
    const begin = Math.max((timeline.start[row] - left) * scale, 0);
    const end = Math.min((timeline.end[row] - left) * scale, columns);
    for (let column = Math.floor(begin); column < end; column++) {
      const share = Math.min(end, column + 1) - Math.max(begin, column);
      shares[column * palette.size + number] += share / bars.parts[row];
    }
  }
}

/** Fill a column of pixels with its colours, one after the other, and idle time below. */
function fillColumn({ data, at, next }, lines, shares, palette, idle) {
  let [number, reached] = [0, shares[0]];
  for (let line = 0; line < lines; line++) {
    const middle = (line + 0.5) / lines;
    while (number < shares.length && middle > reached) reached += shares[++number] ?? 0;
    const [red, green, blue] = number < shares.length ? palette.channels[number] : idle;
    data[at] = red;
    data[at + 1] = green;
    data[at + 2] = blue;
    data[at + 3] = 255;
    at += next;
  }
}
