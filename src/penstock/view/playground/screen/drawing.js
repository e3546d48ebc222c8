// Draws a timeline: ranks down, time across. The same strokes make cards, the picture and files.

/**
 * Where things are: `left` pixels for labels, then time at `scale` pixels per second, of which
 * `scrolled` pixels are out of sight. A lane has bars and, if there is room, a curve of memory.
 * @typedef {{left: number, top: number, scale: number, scrolled: number, width: number,
 *   lane: number, bar: number, curve: number}} Frame
 */

const AXIS = 22;

class Painter {
  /** @param {Timeline} timeline @param {Frame} frame @param {any} shades @param {Record<string, string>} colours */
  constructor(timeline, frame, shades, colours) {
    this.timeline = timeline;
    this.schedule = timeline.schedule;
    this.frame = frame;
    const count = Math.min(this.schedule.mostStages, shades.length);
    this.shades = shades[count - 1];
    this.colours = colours;
  }

  /** @param {number} time */
  x(time) {
    return this.frame.left + time * this.frame.scale - this.frame.scrolled;
  }

  /** @param {number} rank */
  y(rank) {
    return this.frame.top + rank * this.frame.lane;
  }

  /** Return the box of a row. Members of an overlap share the height, forward above. @param {number} row @returns {Box} */
  box(row) {
    const { schedule, timeline } = this;
    const [from, to] = schedule.work(row);
    const members = Array.from({ length: to - from }, (_, at) => from + at);
    members.sort((one, other) => schedule.kind[one] - schedule.kind[other] || one - other);
    const height = this.frame.bar / members.length;
    const left = this.x(this.startOf(row));
    const top = this.y(schedule.rank[row]) + members.indexOf(row) * height;
    return { left, top, width: timeline.duration[row] * this.frame.scale, height };
  }

  /** When a row starts or, if it never runs, where it would follow on its rank. @param {number} row */
  startOf(row) {
    const { schedule, timeline } = this;
    const start = timeline.start[row];
    if (!Number.isNaN(start)) return start;
    const rank = schedule.rank[row];
    let time = Math.max(timeline.clock[rank], timeline.seconds);
    for (let each = timeline.stuckAt[rank]; each < schedule.opening[row]; each = schedule.work(each)[1]) {
      time += timeline.duration[each];
    }
    return time;
  }

  /** How far the picture reaches: to the last end, or to the last action that never runs. */
  get extent() {
    const { schedule, timeline } = this;
    let most = timeline.seconds;
    for (let rank = 0; rank < schedule.numRanks; rank++) {
      const row = schedule.first[rank + 1] - 1;
      if (row < schedule.first[rank] || timeline.stuckAt[rank] < 0) continue;
      most = Math.max(most, this.startOf(row) + timeline.duration[row]);
    }
    return most;
  }

  /** Draw everything up to a moment; what comes later is pale. @param {any} surface @param {number} now */
  draw(surface, now) {
    const { schedule, timeline, frame, colours } = this;
    for (let rank = 0; rank < schedule.numRanks; rank++) {
      const end = this.x(timeline.seconds) - frame.left;
      const box = { left: frame.left, top: this.y(rank), width: Math.max(0, Math.min(end, frame.width)), height: frame.bar };
      surface.rect(box, { fill: colours.idle });
    }
    for (let row = 0; row < schedule.numRows; row++) this.drawRow(surface, row, now);
    if (frame.curve) for (let rank = 0; rank < schedule.numRanks; rank++) this.drawCurve(surface, rank);
  }

  /** @param {any} surface @param {number} row @param {number} now */
  drawRow(surface, row, now) {
    const { schedule, timeline, frame } = this;
    const box = this.box(row);
    const right = box.left + box.width;
    if (right < frame.left || box.left > frame.left + frame.width) return;
    if (box.left < frame.left) [box.left, box.width] = [frame.left, right - frame.left];
    const local = schedule.localStage[schedule.stage[row]];
    const shades = this.shades[schedule.kind[row]];
    const [fill, ink] = shades[Math.min(local, shades.length - 1)];
    const runs = !Number.isNaN(timeline.start[row]);
    const opacity = !runs ? 0.3 : timeline.start[row] > now ? 0.22 : 1;
    const gap = box.width > 5 ? 1 : box.width > 2.5 ? 0.5 : 0;
    const drawn = { ...box, width: Math.max(0.3, box.width - gap) };
    surface.rect(drawn, { fill, opacity, radius: box.width > 8 && frame.bar > 12 ? 2 : 0 });
    if (!runs && timeline.stuckAt[schedule.rank[row]] === schedule.opening[row]) {
      const inner = { left: drawn.left + 1, top: drawn.top + 1, width: Math.max(1, drawn.width - 2), height: drawn.height - 2 };
      surface.rect(inner, { line: this.colours.wrong });
    }
    const size = Math.min(11.5, box.height - 2);
    const text = String(schedule.microbatch[row]);
    if (size < 7 || box.width < 4 + 6.5 * text.length) return;
    const faint = opacity < 1;
    surface.text(text, box.left + drawn.width / 2, box.top + box.height / 2 + 0.5, { size, fill: faint ? this.colours.ink : ink, align: "center" });
  }

  /** Draw the activations that a rank holds, below its bars. @param {any} surface @param {number} rank */
  drawCurve(surface, rank) {
    const { schedule, timeline, frame } = this;
    const most = Math.max(1, ...timeline.held);
    const base = this.y(rank) + frame.bar + frame.curve;
    /** @type {[number, number][]} */
    const points = [[this.x(0), base]];
    for (let row = schedule.first[rank]; row < schedule.first[rank + 1]; row++) {
      if (Number.isNaN(timeline.start[row])) break;
      const time = schedule.kind[row] === FORWARD ? timeline.start[row] : timeline.end[row];
      const x = this.x(time);
      points.push([x, points[points.length - 1][1]], [x, base - (timeline.held[row] / most) * (frame.curve - 2)]);
    }
    points.push([this.x(timeline.seconds), base]);
    const right = frame.left + frame.width;
    const visible = points.map(([x, y]) => /** @type {[number, number]} */ ([Math.min(Math.max(x, frame.left), right), y]));
    surface.path(visible, this.colours.memory, 1.2);
  }

  /** Draw the names of ranks, and seconds along the bottom. @param {any} surface */
  drawLabels(surface) {
    const { schedule, frame, colours } = this;
    for (let rank = 0; rank < schedule.numRanks; rank++) {
      const y = this.y(rank) + frame.bar / 2;
      surface.text(frame.left > 40 ? `rank ${rank}` : String(rank), frame.left - 7, y, { size: 11.5, fill: colours.muted, align: "right" });
    }
    const bottom = this.y(schedule.numRanks) + 2;
    const step = niceStep(64 / frame.scale);
    const last = (frame.scrolled + frame.width) / frame.scale;
    for (let tick = Math.ceil(frame.scrolled / frame.scale / step); tick * step <= last; tick++) {
      const x = this.x(tick * step);
      surface.path([[x, bottom], [x, bottom + 4]], colours.muted);
      const isEdge = x > frame.left + frame.width - 14;
      const label = `${formatTick(tick * step, step)}${tick === 0 ? " s" : ""}`;
      surface.text(label, isEdge ? x + 2 : x, bottom + 13, { size: 11, fill: colours.muted, align: isEdge ? "right" : tick ? "center" : "left" });
    }
  }
}
