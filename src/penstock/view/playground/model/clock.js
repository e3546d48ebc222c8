// What each row waits for (ir/graph.py), and the loop that runs every rank in order (ir/clock.py).

/**
 * The rows that each row needs, `need[first[row]]` to `need[first[row + 1]]`; -1 is a row that is
 * missing. `isRemote` says whether the value comes from another rank.
 * @typedef {{first: Int32Array, need: Int32Array, isRemote: Uint8Array}} Graph
 * @typedef {{forward: Int32Array, input: Int32Array, weight: Int32Array}} Lookup
 */

/** Return the row of every stage and microbatch; the last counts. @param {Schedule} schedule @returns {Lookup} */
function findRows(schedule) {
  const size = schedule.numStages * schedule.microbatches;
  const [forward, input, weight] = [0, 1, 2].map(() => new Int32Array(size).fill(NONE));
  for (let row = 0; row < schedule.numRows; row++) {
    const slot = schedule.stage[row] * schedule.microbatches + schedule.microbatch[row];
    const kind = schedule.kind[row];
    if (kind === FORWARD) forward[slot] = row;
    if (kind === INPUT || kind === BACKWARD) input[slot] = row;
    if (kind === WEIGHT || kind === BACKWARD) weight[slot] = row;
  }
  return { forward, input, weight };
}

/** @param {Schedule} schedule @returns {Graph} */
function buildGraph(schedule) {
  const { forward, input } = findRows(schedule);
  /** @type {number[][]} */
  const producers = schedule.rankOfStage.map(() => []);
  /** @type {number[][]} */
  const consumers = schedule.rankOfStage.map(() => []);
  for (const [producer, consumer] of schedule.layout.edges) {
    producers[consumer].push(producer);
    consumers[producer].push(consumer);
  }
  /** @type {[number[], number[], number[]]} */
  const [sizes, need, isRemote] = [[], [], []];
  for (let row = 0; row < schedule.numRows; row++) {
    const [stage, microbatch] = [schedule.stage[row], schedule.microbatch[row]];
    /** @param {Int32Array} table @param {number} owner */
    const add = (table, owner) => {
      need.push(table[owner * schedule.microbatches + microbatch]);
      isRemote.push(Number(schedule.rankOfStage[owner] !== schedule.rankOfStage[stage]));
    };
    const before = need.length;
    switch (schedule.kind[row]) {
      case FORWARD:
        producers[stage].forEach((each) => add(forward, each));
        break;
      case WEIGHT:
        add(input, stage);
        break;
      default:
        add(forward, stage);
        consumers[stage].forEach((each) => add(input, each));
    }
    sizes.push(need.length - before);
  }
  return { first: bounds(sizes), need: Int32Array.from(need), isRemote: Uint8Array.from(isRemote) };
}

/**
 * Run each rank until it must wait; the rank that starts the awaited row wakes it.
 * @param {Schedule} schedule @param {Graph} graph @param {Float64Array} duration @param {number} transfer
 */
function runInOrder(schedule, graph, duration, transfer) {
  const { numRanks, numRows, first } = schedule;
  const start = new Float64Array(numRows).fill(NaN);
  const [stuckAt, waitsFor, nextWaiter] = [0, 1, 2].map(() => new Int32Array(numRanks).fill(NONE));
  const waiter = new Int32Array(numRows).fill(NONE);
  const clock = new Float64Array(numRanks);
  const position = first.slice(0, numRanks);
  const ready = Array.from({ length: numRanks }, (_, rank) => numRanks - 1 - rank);
  while (ready.length) {
    const rank = /** @type {number} */ (ready.pop());
    let row = position[rank];
    let isStuck = false;
    let missing = NONE;
    while (row < first[rank + 1] && !isStuck) {
      const [, end] = schedule.work(row);
      let begin = clock[rank];
      for (let slot = graph.first[row]; slot < graph.first[end]; slot++) {
        const other = graph.need[slot];
        if (other === NONE || Number.isNaN(start[other])) {
          [isStuck, missing] = [true, other];
          break;
        }
        begin = Math.max(begin, start[other] + duration[other] + transfer * graph.isRemote[slot]);
      }
      if (isStuck) break;
      for (let member = row; member < end; member++) {
        start[member] = begin;
        for (let woken = waiter[member]; woken >= 0; woken = nextWaiter[woken]) {
          ready.push(woken);
          stuckAt[woken] = waitsFor[woken] = NONE;
        }
      }
      clock[rank] = begin + duration[row];
      row = end;
    }
    position[rank] = row;
    if (!isStuck) continue;
    stuckAt[rank] = row;
    waitsFor[rank] = missing;
    if (missing === NONE) continue;
    nextWaiter[rank] = waiter[missing];
    waiter[missing] = rank;
  }
  return { start, stuckAt, waitsFor, clock };
}

/** Return ranks of a stuck run, each waiting for the next and the last for the first.
 * @param {Schedule} schedule @param {{stuckAt: Int32Array, waitsFor: Int32Array}} run */
function findCycle(schedule, run) {
  let rank = run.stuckAt.findIndex((row) => row >= 0);
  /** @type {number[]} */
  const seen = [];
  while (!seen.includes(rank)) {
    seen.push(rank);
    rank = schedule.rank[run.waitsFor[rank]];
  }
  return seen.slice(seen.indexOf(rank));
}
