// One timeline on the screen: its two canvases, and where everything is drawn.

class Panel {
  constructor(element, timeline, settings) {
    this.element = element;
    this.timeline = timeline;
    this.bars = new Bars(timeline, settings.lane_height);
    this.shades = new Shades(timeline, settings.shades);
    this.hiddenKinds = new Set();
    this.hiddenRanks = new Set();
    this.isCritical = new Uint8Array(timeline.numRows);
    for (const row of timeline.critical) this.isCritical[row] = 1;
    const addCanvas = () => element.appendChild(document.createElement("canvas"));
    this.contexts = [addCanvas().getContext("2d"), addCanvas().getContext("2d")];
    // Provides the height to scroll over; the canvases stay in view.
    this.spacer = element.appendChild(document.createElement("div"));
  }

  /** Fit the canvases to the width of the page. */
  resize(window, roomHeight, hasMemory) {
    const width = this.element.clientWidth;
    const ranks = Array.from({ length: this.timeline.numRanks }, (_, rank) => rank);
    const shown = ranks.filter((rank) => !this.hiddenRanks.has(rank));
    this.ratio = globalThis.devicePixelRatio || 1;
    this.lanes = new Lanes({ shown, width, roomHeight, hasMemory, window });
    const { height, fullHeight } = this.lanes;
    for (const { canvas } of this.contexts) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    // The second canvas covers the first.
    this.contexts[1].canvas.style.marginTop = `${-height}px`;
    this.element.style.height = `${height}px`;
    this.spacer.style.height = `${fullHeight - height}px`;
  }

  paint(colours) {
    this.lanes.scrolled = this.element.scrollTop;
    paintPanel(this.contexts[0], this, colours);
  }

  paintMarks(marks, colours) {
    this.lanes.scrolled = this.element.scrollTop;
    paintMarks(this.contexts[1], this, marks, colours);
  }

  countVisible() {
    const { visibleRanks, window } = this.lanes;
    let count = 0;
    for (const rank of visibleRanks) {
      const [from, to] = this.bars.between(rank, window.left, window.right);
      count += to - from;
    }
    return count;
  }

  eachVisible(visit) {
    const { visibleRanks, window } = this.lanes;
    for (const rank of visibleRanks) {
      const [from, to] = this.bars.between(rank, window.left, window.right);
      for (let bar = from; bar < to; bar++) visit(this.bars.rows[bar]);
    }
  }

  /** Visit the changes of a rank's memory, from just before the visible part. */
  eachLevel(rank, visit) {
    const { first, start, end, memory } = this.timeline;
    const { left, right } = this.lanes.window;
    const from = findFirst(first[rank], first[rank + 1], (row) => start[row] > left);
    // The last change before the visible part may be a few rows back, within an overlap.
    for (let row = Math.max(from - 4, first[rank]); row < first[rank + 1]; row++) {
      if (start[row] > right) break;
      const isEarly = this.timeline.kinds[this.timeline.kind(row)].takes_bytes_first;
      visit(isEarly ? start[row] : end[row], memory[row]);
    }
  }

  /** Return what a rank holds at a time. */
  heldAt(rank, time) {
    let now = 0;
    this.eachLevel(rank, (when, held) => {
      if (when <= time) now = held;
    });
    return now;
  }

  /** Return the box of a row, in pixels from the corner of the canvas. */
  box(row) {
    const { lanes, bars, timeline } = this;
    const x = lanes.x(timeline.start[row]);
    const y = lanes.y(bars.top(row), timeline.rank[row]);
    const height = lanes.y(bars.bottom(row), timeline.rank[row]) - y;
    return { x, y, width: lanes.x(timeline.end[row]) - x, height };
  }

  /** Convert a point on the screen to a time and a height in lanes. */
  point(event) {
    const { left, top } = this.element.getBoundingClientRect();
    this.lanes.scrolled = this.element.scrollTop;
    const [x, y] = [event.clientX - left, event.clientY - top];
    const isOnLanes = x >= this.lanes.margin && y < this.lanes.laneHeight;
    const isOnLabel = x < this.lanes.margin && y < this.lanes.laneHeight;
    const isOnMemory = isOnLanes && this.lanes.isOnMemory(y);
    return { time: this.lanes.time(x), lane: this.lanes.lane(y), isOnLanes, isOnMemory, isOnLabel };
  }

  /** Return how far across the lanes a point on the screen is, from 0 to 1. */
  share(clientX) {
    const { left } = this.element.getBoundingClientRect();
    return clamp((clientX - left - this.lanes.margin) / this.lanes.width, 0, 1);
  }

  /** Scroll a rank into view. */
  reveal(rank) {
    const { step, laneHeight } = this.lanes;
    const [top, bottom] = [this.lanes.slot(rank) * step, (this.lanes.slot(rank) + 1) * step];
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (bottom > this.element.scrollTop + laneHeight) this.element.scrollTop = bottom - laneHeight;
  }
}

/** The colour of every kind on every stage of a rank, and of the number on it. */
class Shades {
  constructor(timeline, shades) {
    this.timeline = timeline;
    this.table = shades.map((fills) =>
      fills.map(([fill, ink]) => ({ fill, ink, channels: channelsOf(fill) })),
    );
    this.ofName = Array.from(timeline.names.kind, (kind, name) => {
      return this.table[kind][timeline.localStageOf[timeline.names.stage[name]]];
    });
  }

  of(row) {
    return this.ofName[this.timeline.name[row]];
  }
}

/** Return red, green and blue of a colour such as #2b63a8. */
function channelsOf(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}
