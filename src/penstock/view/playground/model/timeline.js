// From a schedule and costs to times, idle time and memory, by the rules of sim/.

/**
 * One rank's share of the model: seconds, and bytes in GiB.
 * @typedef {{forward: number, input: number, weight: number, transfer: number, gain: number,
 *   activation: number, stash: number}} Costs
 */

class Timeline {
  /** @param {Schedule} schedule @param {Costs} costs */
  constructor(schedule, costs) {
    this.schedule = schedule;
    this.costs = costs;
    this.share = schedule.numRanks / (Math.max(...schedule.parts) + 1);
    this.graph = buildGraph(schedule);
    this.duration = priceRows(schedule, costs, this.share);
    const run = runInOrder(schedule, this.graph, this.duration, costs.transfer);
    this.start = run.start;
    this.stuckAt = run.stuckAt;
    this.clock = run.clock;
    this.isFinished = run.stuckAt.every((row) => row < 0);
    this.end = this.start.map((start, row) => start + this.duration[row]);
    this.seconds = largest(this.end);
    this.held = heldActivations(schedule);
  }

  /** When a need of a row has arrived. @param {number} slot */
  arrival(slot) {
    const other = this.graph.need[slot];
    return this.end[other] + this.costs.transfer * this.graph.isRemote[slot];
  }

  /** Return the need that a work waits for longest, as a slot of the graph, or -1. @param {number} row */
  lateNeed(row) {
    const [from, to] = this.schedule.work(row);
    let late = NONE;
    for (let slot = this.graph.first[from]; slot < this.graph.first[to]; slot++) {
      if (late === NONE || this.arrival(slot) > this.arrival(late)) late = slot;
    }
    return late;
  }

  /** Return the numbers of the step, as Python defines them; only for a run that finished. */
  measure() {
    const { schedule } = this;
    const ranks = Array.from({ length: schedule.numRanks }, (_, rank) => this.measureRank(rank));
    const begin = Math.min(...ranks.map((rank) => rank.begin));
    const endTime = Math.max(...ranks.map((rank) => rank.end)) - begin;
    const idle = ranks.map(({ busy }) => {
      return endTime - busy > 1e-12 * endTime ? endTime - busy : 0;
    });
    const spans = ranks.map((rank) => rank.end - rank.begin);
    const longestSpan = Math.max(...spans);
    const papersIdle = longestSpan - ranks[spans.indexOf(longestSpan)].busy;
    const peakActivations = Math.max(...ranks.map((rank) => rank.activations));
    return {
      endTime,
      bubble: endTime ? sum(idle) / (endTime * schedule.numRanks) : 0,
      rankBubbles: idle.map((seconds) => (endTime ? seconds / endTime : 0)),
      papersIdle: papersIdle > 1e-12 * longestSpan ? papersIdle : 0,
      peakActivations,
      peakMicrobatches: (peakActivations * schedule.numRanks) / schedule.numParts,
      rankActivations: ranks.map((rank) => rank.activations),
      peakBytes: Math.max(...ranks.map((rank) => rank.bytes)),
    };
  }

  /** @param {number} rank */
  measureRank(rank) {
    const { schedule, costs, share } = this;
    const [from, to] = [schedule.first[rank], schedule.first[rank + 1]];
    let [begin, end, busy, bytes, mostBytes, activations] = [Infinity, -Infinity, 0, 0, 0, 0];
    for (let row = from; row < to; row++) {
      begin = Math.min(begin, this.start[row]);
      end = Math.max(end, this.end[row]);
      if (schedule.opening[row] === row) busy += this.duration[row];
      bytes += byteChange(schedule.kind[row], costs) * share;
      mostBytes = Math.max(mostBytes, bytes);
      activations = Math.max(activations, this.held[row]);
    }
    return { begin, end, busy, bytes: mostBytes, activations };
  }
}

/** @param {Schedule} schedule @param {Costs} costs @param {number} share */
function priceRows(schedule, costs, share) {
  const [forward, input, weight] = [costs.forward, costs.input, costs.weight].map((each) => each * share);
  const byKind = [forward, input, weight, input + weight];
  const duration = new Float64Array(schedule.numRows);
  for (let row = 0; row < schedule.numRows; ) {
    const [, end] = schedule.work(row);
    const parts = Array.from(schedule.kind.subarray(row, end), (kind) => byKind[kind]);
    const saved = parts.length > 1 ? costs.gain * Math.min(...parts) : 0;
    duration.fill(sum(parts) - saved, row, end);
    row = end;
  }
  return duration;
}

/** Per row, the activations that its rank then holds, each from its F to its B or W. @param {Schedule} schedule */
function heldActivations(schedule) {
  const held = new Int32Array(schedule.numRows);
  for (let rank = 0; rank < schedule.numRanks; rank++) {
    let count = 0;
    for (let row = schedule.first[rank]; row < schedule.first[rank + 1]; row++) {
      if (schedule.kind[row] === FORWARD) count++;
      else if (schedule.kind[row] !== INPUT) count--;
      held[row] = count;
    }
  }
  return held;
}

/** @param {number} kind @param {Costs} costs */
function byteChange(kind, { activation, stash }) {
  return [activation, stash - activation, -stash, -activation][kind];
}

/** @param {Iterable<number>} values */
function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

/** @param {Float64Array} column */
function largest(column) {
  let most = 0;
  for (const value of column) if (value > most) most = value;
  return most;
}
