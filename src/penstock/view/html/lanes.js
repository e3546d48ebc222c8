// The size of the lanes of a panel, and the mapping between pixels, times and ranks.

const AXIS_HEIGHT = 26;
const LANE_LIMITS = [8, 40];
// If the lanes have to scroll anyway, they get a comfortable height.
const SCROLLED_LANE = 16;
const MEMORY_LIMITS = [16, 34];
// Labels are short on screens narrower than this.
const NARROW = 560;

class Lanes {
  /** Choose sizes in pixels for the ranks that are shown and the available width and height. */
  constructor({ shown, width, roomHeight, hasMemory, window }) {
    this.shown = shown;
    const numRanks = shown.length;
    this.slots = new Map(shown.map((rank, slot) => [rank, slot]));
    const [least, most] = LANE_LIMITS;
    const memory = hasMemory ? clamp(roomHeight / numRanks / 2, ...MEMORY_LIMITS) : 0;
    this.numRanks = numRanks;
    const fitting = roomHeight / numRanks - memory;
    this.barStep = fitting < least ? SCROLLED_LANE : Math.min(fitting, most);
    this.memoryStep = memory;
    this.step = this.barStep + memory;
    this.isNarrow = width < NARROW;
    this.margin = this.isNarrow ? 26 : 62;
    this.width = Math.max(width - this.margin - 8, 50);
    this.fullHeight = numRanks * this.step + AXIS_HEIGHT;
    this.height = Math.min(this.fullHeight, Math.max(roomHeight, 3 * this.step) + AXIS_HEIGHT);
    this.window = window;
    this.scrolled = 0;
  }

  /** The height of the lanes, without the axis below them. */
  get laneHeight() {
    return this.height - AXIS_HEIGHT;
  }

  /** The ranks that are in view, top to bottom. */
  get visibleRanks() {
    const from = Math.max(0, Math.floor(this.scrolled / this.step));
    return this.shown.slice(from, Math.ceil((this.scrolled + this.laneHeight) / this.step));
  }

  /** Return the place of a rank among the shown ones; a collapsed rank is far out of sight. */
  slot(rank) {
    return this.slots.get(rank) ?? -1000;
  }

  x(time) {
    return this.margin + ((time - this.window.left) / this.window.span) * this.width;
  }

  time(x) {
    return this.window.left + ((x - this.margin) / this.width) * this.window.span;
  }

  /** Convert a height in lanes to pixels; rank 2 extends from 1.5 to 2.5. */
  y(lane, rank) {
    return this.slot(rank) * this.step + (lane - rank + 0.5) * this.barStep - this.scrolled;
  }

  /** Convert pixels to a height in lanes; the memory of a rank counts as just above it. */
  lane(y) {
    const slot = clamp(Math.floor((y + this.scrolled) / this.step), 0, this.numRanks - 1);
    const height = clamp((y + this.scrolled - slot * this.step) / this.barStep, 0, 0.999);
    return this.shown[slot] - 0.5 + height;
  }

  /** Whether a height in pixels is on the memory curve of a rank. */
  isOnMemory(y) {
    return (y + this.scrolled) % this.step > this.barStep;
  }
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}
