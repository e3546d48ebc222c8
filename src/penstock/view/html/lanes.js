// The size of the lanes of a panel, and the mapping between pixels, times and ranks.

const AXIS_HEIGHT = 26;
const LANE_LIMITS = [8, 40];
// If the lanes have to scroll anyway, they get a comfortable height.
const SCROLLED_LANE = 16;
const MEMORY_LIMITS = [16, 34];
// Labels are short on screens narrower than this.
const NARROW = 560;

class Lanes {
  /** Choose sizes in pixels for a number of ranks and the available width and height. */
  constructor({ numRanks, width, roomHeight, hasMemory, window }) {
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

  get firstRank() {
    return Math.max(0, Math.floor(this.scrolled / this.step));
  }

  get endRank() {
    return Math.min(this.numRanks, Math.ceil((this.scrolled + this.laneHeight) / this.step));
  }

  x(time) {
    return this.margin + ((time - this.window.left) / this.window.span) * this.width;
  }

  time(x) {
    return this.window.left + ((x - this.margin) / this.width) * this.window.span;
  }

  /** Convert a height in lanes to pixels; rank 2 extends from 1.5 to 2.5. */
  y(lane, rank) {
    return rank * this.step + (lane - rank + 0.5) * this.barStep - this.scrolled;
  }

  /** Convert pixels to a height in lanes; the memory of a rank counts as just above it. */
  lane(y) {
    const rank = Math.floor((y + this.scrolled) / this.step);
    return rank - 0.5 + Math.min(0.999, (y + this.scrolled - rank * this.step) / this.barStep);
  }

  /** Whether a height in pixels is on the memory curve of a rank. */
  isOnMemory(y) {
    return (y + this.scrolled) % this.step > this.barStep;
  }
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}
