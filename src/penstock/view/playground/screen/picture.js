// The large picture: zoom, scrolling, the cursor of time, and the handle of the selected action.

class Picture {
  /** @param {any} shades */
  constructor(shades) {
    this.shades = shades;
    this.zoom = 1;
    this.scroller = byId("scroller");
    this.canvas = byId("picture");
    /** @type {Painter | null} */
    this.painter = null;
  }

  /** Draw a timeline. @param {Timeline} timeline @param {number} now @param {Record<string, string>} colours */
  draw(timeline, now, colours) {
    const width = this.scroller.clientWidth;
    const isNarrow = width < 560;
    const left = isNarrow ? 26 : 58;
    const ranks = timeline.schedule.numRanks;
    const bar = ranks > 4 ? 22 : 28;
    const curve = ranks > 4 ? 12 : 16;
    const frame = { left, top: 2, scale: 1, scrolled: 0, width: width - left - 4, lane: bar + curve + 5, bar, curve };
    const painter = new Painter(timeline, frame, this.shades, colours);
    const fits = frame.width / (painter.extent || 1);
    frame.scale = fits * this.zoom;
    const height = painter.y(ranks) + AXIS;
    const room = byId("room");
    room.style.width = `${Math.max(width, left + 4 + frame.width * this.zoom)}px`;
    frame.scrolled = this.scroller.scrollLeft;
    const surface = new CanvasSurface(this.canvas, width, height, devicePixelRatio);
    painter.draw(surface, now);
    painter.drawLabels(surface);
    if (now < timeline.seconds) {
      const x = painter.x(now);
      if (x >= left) surface.path([[x, 0], [x, painter.y(ranks)]], colours.accent, 2);
    }
    this.painter = painter;
  }

  /** Zoom around a point across the visible part, from 0 to 1. @param {number} factor @param {number} [share] */
  zoomBy(factor, share = 0.5) {
    const zoom = Math.min(40, Math.max(1, this.zoom * factor));
    const { frame } = /** @type {Painter} */ (this.painter);
    const at = this.scroller.scrollLeft + share * frame.width;
    const goal = (at * zoom) / this.zoom - share * frame.width;
    this.zoom = zoom;
    byId("room").style.width = `${frame.left + 4 + frame.width * zoom}px`;
    this.scroller.scrollLeft = goal;
  }

  /** Return rank and time of a point on the screen. @param {{clientX: number, clientY: number}} event */
  point(event) {
    const { frame, schedule } = /** @type {Painter} */ (this.painter);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const rank = Math.floor((y - frame.top) / frame.lane);
    const time = (x - frame.left + frame.scrolled) / frame.scale;
    return { rank: Math.min(Math.max(rank, 0), schedule.numRanks - 1), time, isInside: x >= frame.left && y < frame.top + schedule.numRanks * frame.lane };
  }

  /** Return the work at a rank and a time, or null. @param {number} rank @param {number} time */
  workAt(rank, time) {
    const { schedule, timeline } = /** @type {Painter} */ (this.painter);
    for (let row = schedule.first[rank]; row < schedule.first[rank + 1]; row = schedule.work(row)[1]) {
      const start = /** @type {Painter} */ (this.painter).startOf(row);
      if (start <= time && time < start + timeline.duration[row]) return { rank, position: schedule.position[row] };
    }
    return null;
  }

  /** Put the handle around the selected work. @param {{rank: number, position: number} | null} place */
  showHandle(place) {
    const handle = byId("handle");
    const painter = /** @type {Painter} */ (this.painter);
    const { schedule, frame } = painter;
    handle.hidden = !place || place.position >= schedule.orders[place.rank].length;
    if (handle.hidden || !place) return;
    const row = schedule.rowAt(place.rank, place.position);
    const { left, width } = painter.box(row);
    const style = { left: `${left + frame.scrolled - 2}px`, top: `${painter.y(place.rank) - 2}px`, width: `${Math.max(8, width + 3)}px`, height: `${frame.bar + 4}px` };
    Object.assign(handle.style, style);
    handle.setAttribute("aria-label", `Selected: ${describeWork(schedule, row)} on rank ${place.rank}; drag to move`);
  }
}
