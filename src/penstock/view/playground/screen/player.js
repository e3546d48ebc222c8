// Plays a step: a moment that runs through it, and what every rank does then.

// A step plays in this many seconds at speed 1.
const PLAY_SECONDS = 14;

class Player {
  /** @param {() => void} onMove */
  constructor(onMove) {
    this.onMove = onMove;
    this.now = Infinity;
    this.isPlaying = false;
    this.before = 0;
    /** @type {Timeline | null} */
    this.timeline = null;
  }

  /** @param {Timeline} timeline */
  load(timeline) {
    this.timeline = timeline;
    if (this.now >= this.seconds) this.now = Infinity;
  }

  get seconds() {
    return this.timeline?.seconds ?? 0;
  }

  get isAtEnd() {
    return this.now >= this.seconds;
  }

  toggle() {
    this.isPlaying = !this.isPlaying;
    if (this.isPlaying && this.isAtEnd) this.now = 0;
    this.before = performance.now();
    if (this.isPlaying) requestAnimationFrame((time) => this.frame(time));
    this.onMove();
  }

  pause() {
    this.isPlaying = false;
  }

  /** @param {number} time */
  frame(time) {
    if (!this.isPlaying) return;
    const speed = Number(byId("speed").value);
    this.now += (Math.max(0, time - this.before) / 1000) * (this.seconds / PLAY_SECONDS) * speed;
    this.before = time;
    if (this.isAtEnd) this.go(Infinity);
    else requestAnimationFrame((next) => this.frame(next));
    this.onMove();
  }

  /** @param {number} time */
  go(time) {
    this.pause();
    this.now = time >= this.seconds ? Infinity : Math.max(0, time);
    this.onMove();
  }

  /** Go to the next event, or to the one before. @param {1 | -1} direction */
  step(direction) {
    const times = this.timeline ? momentsOf(this.timeline) : [0];
    const now = Math.min(this.now, this.seconds);
    const found = direction > 0 ? times.find((time) => time > now + 1e-9) : times.findLast((time) => time < now - 1e-9);
    this.go(found ?? (direction > 0 ? Infinity : 0));
  }

  /** Show what every rank does. @param {any} shades @param {any} numbers */
  show(shades, numbers) {
    const { timeline } = this;
    if (!timeline) return;
    const { schedule } = timeline;
    const now = Math.min(this.now, this.seconds);
    byId("time").value = String(Math.round((1000 * now) / (this.seconds || 1)));
    byId("time").setAttribute("aria-valuetext", `${formatTime(now)} seconds`);
    byId("clock").textContent = this.isAtEnd ? `${formatNumber(this.seconds)} s, ${timeline.isFinished ? "the whole step" : "then nothing runs"}` : `${now.toFixed(2)} s of ${formatNumber(this.seconds)} s`;
    byId("play").textContent = this.isPlaying ? "⏸ Pause" : "▶ Play";
    const items = schedule.orders.map((_, rank) => {
      const moment = momentOf(timeline, rank, now);
      if (this.isAtEnd && moment.state === "done" && numbers) {
        const idle = (100 * numbers.rankBubbles[rank]).toFixed(1);
        // In microbatches, as in the figures above: a rank with several stages holds parts of one.
        const held = (numbers.rankActivations[rank] * schedule.numRanks) / schedule.numParts;
        moment.text = `idle ${idle} % of the step; ${schedule.isForwardOnly ? "keeps nothing" : `holds at most ${countText(held, "microbatch")}`}`;
      }
      return make("li", { class: moment.state }, this.dot(moment, shades), make("span", { class: "rank" }, `rank ${rank}`), make("span", {}, moment.text));
    });
    byId("moments").replaceChildren(...items);
  }

  /** @param {Moment} moment @param {any} shades */
  dot({ state, row }, shades) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const schedule = /** @type {Timeline} */ (this.timeline).schedule;
    const fill = state === "runs" ? shades[0][schedule.kind[row]][0][0] : state === "stuck" ? "var(--wrong)" : "var(--idle)";
    for (const [name, value] of Object.entries({ width: "10", height: "10", rx: "2", fill })) box.setAttribute(name, value);
    svg.setAttribute("viewBox", "0 0 10 10");
    svg.setAttribute("aria-hidden", "true");
    svg.append(box);
    return svg;
  }
}
