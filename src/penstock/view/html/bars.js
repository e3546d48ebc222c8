// The position of every bar: ranks down, time across. Members of an overlap share a lane.

class Bars {
  /** Make one bar per row of a busy kind that takes any time, ordered by start. */
  constructor(timeline, laneHeight) {
    this.timeline = timeline;
    this.laneHeight = laneHeight;
    this.part = new Uint8Array(timeline.numRows);
    this.parts = new Uint8Array(timeline.numRows).fill(1);
    this.hasOverlap = false;
    this.shareLanes();
    this.pickRows();
  }

  /** Number the members of each overlap by kind: forward above, backward below. */
  shareLanes() {
    const { joined, numRows } = this.timeline;
    for (let row = 0; row < numRows; row++) {
      if (!joined[row]) continue;
      const [from, to] = this.timeline.work(row);
      const members = Array.from({ length: to - from + 1 }, (_, at) => from + at);
      members.sort((one, other) => this.timeline.kind(one) - this.timeline.kind(other) || one - other);
      members.forEach((member, part) => {
        this.part[member] = part;
        this.parts[member] = members.length;
      });
      this.hasOverlap = true;
      row = to;
    }
  }

  pickRows() {
    const { timeline } = this;
    const { start, end, first, kinds } = timeline;
    const isBusy = kinds.map((kind) => kind.is_busy);
    const rows = new Int32Array(timeline.numRows);
    let count = 0;
    this.first = new Int32Array(timeline.numRanks + 1);
    for (let rank = 0; rank < timeline.numRanks; rank++) {
      const from = count;
      let isSorted = true;
      for (let row = first[rank]; row < first[rank + 1]; row++) {
        if (!isBusy[timeline.kind(row)] || end[row] <= start[row]) continue;
        isSorted &&= count === from || start[rows[count - 1]] <= start[row];
        rows[count++] = row;
      }
      if (!isSorted) rows.subarray(from, count).sort((one, other) => start[one] - start[other]);
      this.first[rank + 1] = count;
    }
    this.rows = rows.subarray(0, count);
    this.latestEnd = this.runningEnds();
  }

  /** Return the latest end on each bar's rank so far, for a fast search of visible bars. */
  runningEnds() {
    const latest = new Float64Array(this.rows.length);
    for (let rank = 0; rank + 1 < this.first.length; rank++) {
      let end = 0;
      for (let bar = this.first[rank]; bar < this.first[rank + 1]; bar++) {
        latest[bar] = end = Math.max(end, this.timeline.end[this.rows[bar]]);
      }
    }
    return latest;
  }

  /** Return the range of a rank's bars that may be visible between two times. */
  between(rank, left, right) {
    const [from, to] = [this.first[rank], this.first[rank + 1]];
    return [
      findFirst(from, to, (bar) => this.latestEnd[bar] > left),
      findFirst(from, to, (bar) => this.timeline.start[this.rows[bar]] >= right),
    ];
  }

  top(row) {
    const strip = this.timeline.kinds[this.timeline.kind(row)].strip;
    if (strip) return this.timeline.rank[row] + strip[0];
    return this.timeline.rank[row] + this.laneHeight * (this.part[row] / this.parts[row] - 0.5);
  }

  bottom(row) {
    const strip = this.timeline.kinds[this.timeline.kind(row)].strip;
    if (strip) return this.timeline.rank[row] + strip[1];
    return this.timeline.rank[row] + this.laneHeight * ((this.part[row] + 1) / this.parts[row] - 0.5);
  }

  /** Return the row at a time and a height in lanes, or -1; the gap around a bar belongs to it. */
  at(time, lane) {
    const rank = Math.round(lane);
    if (rank < 0 || rank >= this.timeline.numRanks) return NOTHING;
    const half = 0.499 * this.laneHeight;
    const height = clamp(lane, rank - half, rank + half);
    const [from, to] = this.between(rank, time, time + this.timeline.tick);
    for (let bar = to - 1; bar >= from; bar--) {
      const row = this.rows[bar];
      const isWithin = this.timeline.start[row] <= time && time < this.timeline.end[row];
      if (isWithin && this.top(row) <= height && height <= this.bottom(row)) return row;
    }
    return NOTHING;
  }

  /** Return the first row of a rank that starts at this time or later, or -1. */
  after(rank, time) {
    const to = this.first[rank + 1];
    const bar = findFirst(this.first[rank], to, (each) => this.timeline.start[this.rows[each]] >= time);
    return bar < to ? this.rows[bar] : NOTHING;
  }
}

/** Return the first number in a range for which a condition turns true, by bisection. */
function findFirst(from, to, holds) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (holds(middle)) to = middle;
    else from = middle + 1;
  }
  return from;
}
