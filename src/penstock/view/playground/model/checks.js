// What is wrong with a schedule: the rules and the words of checks/, for schedules of compute.

const MOST_PROBLEMS = 20;
// The number of works that a message shows before and after the wrong one.
const NEIGHBOURS = 3;

/** @typedef {{text: string, rank: number, position: number}} Problem  `position` is -1 for missing work. */

class Checker {
  /** @param {Schedule} schedule @param {Record<string, string>} wording */
  constructor(schedule, wording) {
    this.schedule = schedule;
    this.wording = wording;
  }

  /** Return the problems of the first search that finds any; later ones rely on earlier ones. */
  find() {
    const searches = [() => this.misplaced(), () => this.incomplete(), () => this.deadlock()];
    for (const search of searches) {
      const problems = search().slice(0, MOST_PROBLEMS);
      if (problems.length) return problems;
    }
    return [];
  }

  misplaced() {
    const { schedule } = this;
    const wrong = this.rows((row) => schedule.rankOfStage[schedule.stage[row]] !== schedule.rank[row]);
    return wrong.map((row) => {
      const [stage, rank] = [schedule.stage[row], schedule.rankOfStage[schedule.stage[row]]];
      return this.atRow(row, "placement", fill(this.wording.placement, { stage, rank }));
    });
  }

  incomplete() {
    const counts = LETTERS.map((_, kind) => this.count(kind));
    const expected = this.expected();
    const problems = [
      ...this.missing(FORWARD, counts[FORWARD], counts[FORWARD], expected),
      ...this.surplus(FORWARD, counts[FORWARD], expected),
    ];
    if (!this.schedule.isForwardOnly) problems.push(...this.backwards(counts, expected));
    return [...problems, ...this.reversed()];
  }

  /** @param {Int32Array[]} counts @param {Uint8Array} expected */
  backwards(counts, expected) {
    const [, first, second, whole] = counts;
    const any = whole.map((count, slot) => count + first[slot] + second[slot]);
    const begun = whole.map((count, slot) => count + first[slot]);
    const problems = this.missing(BACKWARD, any, begun, expected);
    const isBoth = whole.map((count, slot) => Number(count > 0 && first[slot] + second[slot] > 0));
    isBoth.forEach((both, slot) => {
      if (both) problems.push(this.atRow(this.lastRow(BACKWARD, slot), "backward", this.wording["whole and split"]));
    });
    for (const [half, other] of [[INPUT, WEIGHT], [WEIGHT, INPUT]]) {
      counts[half].forEach((count, slot) => {
        if (!count || counts[other][slot] || isBoth[slot]) return;
        const message = fill(this.wording["other half"], { action: this.textOf(other, slot) });
        problems.push(this.atRow(this.lastRow(half, slot), "backward", message));
      });
    }
    for (const kind of [BACKWARD, INPUT, WEIGHT]) problems.push(...this.surplus(kind, counts[kind], expected));
    return problems;
  }

  /** Work that belongs to the step, by stage and microbatch: that of one copy of the model. */
  expected() {
    const { schedule } = this;
    const streams = streamsOf(schedule.parts);
    const streamOf = new Int32Array(schedule.microbatches);
    for (let row = schedule.numRows - 1; row >= 0; row--) {
      if (schedule.kind[row] === FORWARD) streamOf[schedule.microbatch[row]] = streams[schedule.stage[row]];
    }
    return Uint8Array.from({ length: schedule.numStages * schedule.microbatches }, (_, slot) => {
      const [stage, microbatch] = this.split(slot);
      return Number(streams[stage] === streamOf[microbatch]);
    });
  }

  /** @param {number} kind */
  count(kind) {
    const { schedule } = this;
    const count = new Int32Array(schedule.numStages * schedule.microbatches);
    for (const row of this.rows((each) => schedule.kind[each] === kind)) count[this.slot(row)]++;
    return count;
  }

  /** @param {number} kind @param {Int32Array} count @param {Int32Array} begun @param {Uint8Array} expected */
  missing(kind, count, begun, expected) {
    const { schedule, wording } = this;
    const hasFirst = schedule.rankOfStage.some((_, stage) => begun[stage * schedule.microbatches]);
    /** @type {Problem[]} */
    const problems = [];
    count.forEach((found, slot) => {
      if (found || !expected[slot]) return;
      const [stage, microbatch] = this.split(slot);
      const message = wording[!hasFirst && microbatch === 0 ? "missing first" : "missing"];
      const rank = schedule.rankOfStage[stage];
      const text = this.problem(`rank ${rank}`, this.textOf(kind, slot), message, "once");
      problems.push({ text, rank, position: NONE });
    });
    return problems;
  }

  /** @param {number} kind @param {Int32Array} count @param {Uint8Array} expected */
  surplus(kind, count, expected) {
    /** @type {Problem[]} */
    const problems = [];
    count.forEach((found, slot) => {
      if (found <= 1 && (found === 0 || expected[slot])) return;
      const template = this.wording[expected[slot] ? "twice" : "other copy"];
      const message = fill(template, { count: found, microbatch: this.split(slot)[1] });
      problems.push(this.atRow(this.lastRow(kind, slot), "once", message));
    });
    return problems;
  }

  /** Backwards before their forward, and weight halves before their input half. */
  reversed() {
    const { opening } = this.schedule;
    const { forward, input, weight } = findRows(this.schedule);
    /** @type {[Int32Array, Int32Array, string][]} */
    const pairs = [[input, forward, "forward"], [weight, input, "input half"]];
    return pairs.flatMap(([later, earlier, name]) => {
      const wrong = later.filter((row, slot) => {
        const before = earlier[slot];
        return row >= 0 && before >= 0 && row !== before && opening[row] <= opening[before];
      });
      const message = fill(this.wording.order, { earlier: name });
      return Array.from(wrong.sort(), (row) => this.atRow(row, "order", message));
    });
  }

  deadlock() {
    const { schedule, wording } = this;
    const ones = new Float64Array(schedule.numRows).fill(1);
    const run = runInOrder(schedule, buildGraph(schedule), ones, 0);
    if (run.stuckAt.every((row) => row < 0)) return [];
    const cycle = findCycle(schedule, run);
    /** @param {number} row */
    const place = (row) =>
      fill(wording.place, { rank: schedule.rank[row], position: schedule.position[row], action: schedule.text(row) });
    const lines = cycle.map((rank) => {
      return `  ${fill(wording.wait, { stuck: place(run.stuckAt[rank]), awaited: place(run.waitsFor[rank]) })}`;
    });
    const problem = this.atRow(run.stuckAt[cycle[0]], "deadlock", wording.deadlock);
    return [{ ...problem, text: [problem.text.split("\n")[0], ...lines].join("\n") }];
  }

  /** @param {number} row @param {string} rule @param {string} message @returns {Problem} */
  atRow(row, rule, message) {
    const { schedule } = this;
    const [rank, position] = [schedule.rank[row], schedule.position[row]];
    const order = schedule.orders[rank];
    const around = [
      ...order.slice(Math.max(0, position - NEIGHBOURS), position).map(workText),
      `[${workText(order[position])}]`,
      ...order.slice(position + 1, position + 1 + NEIGHBOURS).map(workText),
    ];
    const text = this.problem(`rank ${rank}, position ${position}`, schedule.text(row), message, rule);
    return { text: `${text}\n  rank ${rank}: ${around.join(" ")}`, rank, position };
  }

  /** @param {string} place @param {string} action @param {string} message @param {string} rule */
  problem(place, action, message, rule) {
    return fill(this.wording.problem, { place, action, message, rule });
  }

  /** @param {(row: number) => boolean} holds */
  rows(holds) {
    return Array.from({ length: this.schedule.numRows }, (_, row) => row).filter(holds);
  }

  /** @param {number} row */
  slot(row) {
    return this.schedule.stage[row] * this.schedule.microbatches + this.schedule.microbatch[row];
  }

  /** @param {number} slot @returns {[number, number]} */
  split(slot) {
    return [Math.floor(slot / this.schedule.microbatches), slot % this.schedule.microbatches];
  }

  /** @param {number} kind @param {number} slot */
  textOf(kind, slot) {
    return this.split(slot).join(LETTERS[kind]);
  }

  /** @param {number} kind @param {number} slot */
  lastRow(kind, slot) {
    let row = this.schedule.numRows - 1;
    while (this.schedule.kind[row] !== kind || this.slot(row) !== slot) row--;
    return row;
  }
}

/** Which of the copies of the model each stage belongs to. @param {number[]} parts */
function streamsOf(parts) {
  /** @type {Map<number, number>} */
  const seen = new Map();
  return parts.map((part) => {
    const stream = seen.get(part) ?? 0;
    seen.set(part, stream + 1);
    return stream;
  });
}
