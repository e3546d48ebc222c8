// Schedules as columns, like ir/rows.py, and as lists of works, which edits change.

/** The kinds of compute, in the order of their codes. */
const [FORWARD, INPUT, WEIGHT, BACKWARD] = [0, 1, 2, 3];
const LETTERS = ["F", "I", "W", "B"];
const NONE = -1;

/**
 * @typedef {{kind: number, stage: number, microbatch: number}} Action
 * @typedef {Action[]} Work  One action, or several that run together.
 * @typedef {Work[][]} Orders  Every rank's list.
 * @typedef {[number, number]} Edge  A stage, and a stage that takes in its output.
 * @typedef {{rankOfStage: number[], parts: number[], edges: Edge[], microbatches: number}} Layout
 */

class Schedule {
  /**
   * @param {string} name
   * @param {Orders} orders
   * @param {Layout} layout
   */
  constructor(name, orders, layout) {
    this.name = name;
    this.orders = orders;
    this.layout = layout;
    this.rankOfStage = layout.rankOfStage;
    this.parts = layout.parts;
    this.microbatches = layout.microbatches;
    this.numRanks = orders.length;
    this.numStages = layout.rankOfStage.length;
    this.numParts = new Set(layout.parts).size;
    const actions = orders.flat(2);
    this.numRows = actions.length;
    this.kind = Int8Array.from(actions, (action) => action.kind);
    this.stage = Int32Array.from(actions, (action) => action.stage);
    this.microbatch = Int32Array.from(actions, (action) => action.microbatch);
    this.first = bounds(orders.map((order) => order.flat().length));
    // The first row of the work that each row belongs to, and the work's place in its list.
    this.opening = new Int32Array(this.numRows);
    this.position = new Int32Array(this.numRows);
    this.rank = new Int32Array(this.numRows);
    this.numberRows();
    this.localStage = localStages(layout.rankOfStage);
    this.mostStages = Math.max(...this.localStage) + 1;
  }

  numberRows() {
    let row = 0;
    this.orders.forEach((order, rank) => {
      order.forEach((work, position) => {
        const opening = row;
        for (const _ of work) {
          this.opening[row] = opening;
          this.position[row] = position;
          this.rank[row++] = rank;
        }
      });
    });
  }

  get isForwardOnly() {
    return this.kind.every((kind) => kind === FORWARD);
  }

  /** The rows of the work that a row belongs to: from, and one past the last. @param {number} row */
  work(row) {
    const from = this.opening[row];
    return [from, from + this.orders[this.rank[row]][this.position[row]].length];
  }

  /** Return the first row of a rank's work. @param {number} rank @param {number} position */
  rowAt(rank, position) {
    let row = this.first[rank];
    for (let at = 0; at < position; at++) row += this.orders[rank][at].length;
    return row;
  }

  /** @param {number} row */
  text(row) {
    return `${this.stage[row]}${LETTERS[this.kind[row]]}${this.microbatch[row]}`;
  }
}

/** Return a work as text: 2F0, or (0F3;7B1)OVERLAP_F_B. @param {Work} work */
function workText(work) {
  const texts = work.map(({ kind, stage, microbatch }) => `${stage}${LETTERS[kind]}${microbatch}`);
  return texts.length === 1 ? texts[0] : `(${texts.join(";")})OVERLAP_F_B`;
}

/** Return the index of every stage among the stages of its rank. @param {number[]} rankOfStage */
function localStages(rankOfStage) {
  /** @type {Map<number, number>} */
  const held = new Map();
  return rankOfStage.map((rank) => {
    const index = held.get(rank) ?? 0;
    held.set(rank, index + 1);
    return index;
  });
}

/**
 * Fill in a text that Python wrote, such as "appears {count} times".
 * @param {string} template
 * @param {Record<string, string | number>} values
 */
function fill(template, values) {
  return template.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}
