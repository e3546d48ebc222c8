// Every family at every size, as catalogue.py wrote it.

/**
 * @typedef {{text: string, is_exact: boolean, for_equal_costs: boolean}} FormulaText
 * @typedef {{rank_of_stage: number[], parts: number[], bubble: number[], memory: number[]}} Layer
 * @typedef {{name: string, summary: string, choices: number[], stages_per_rank: number,
 *   bubble: FormulaText, memory: FormulaText, layers: Record<string, Layer>,
 *   refused: Record<string, string>, columns: any}} FamilyData
 */

class Family {
  /** @param {FamilyData} data @param {{ranks: number[], microbatches: number[]}} sizes */
  constructor(data, sizes) {
    this.data = data;
    this.name = data.name;
    this.sizes = sizes;
    /** @type {Map<string, {from: number, lists: number}>} */
    this.places = new Map();
    /** @type {Record<string, Int32Array>} */
    this.columns = {};
  }

  async load() {
    this.columns = await readColumns(this.data.columns);
    let [from, lists] = [0, 0];
    for (const v of this.data.choices) {
      for (const p of this.sizes.ranks) {
        for (const m of this.sizes.microbatches) {
          if (`${v},${p},${m}` in this.data.refused) continue;
          this.places.set(`${v},${p},${m}`, { from, lists });
          for (let rank = 0; rank < p; rank++) from += this.columns.length[lists + rank];
          lists += p;
        }
      }
    }
  }

  /** Return the stages per rank that the family has, if this number is wanted. @param {number} wanted */
  stagesPerRank(wanted) {
    return this.data.choices.includes(wanted) ? wanted : this.data.stages_per_rank;
  }

  /** @param {number} v @param {number} p */
  layer(v, p) {
    return this.data.layers[`${v},${p}`];
  }

  /**
   * Return a schedule, or the reason why there is none.
   * @param {number} v @param {number} p @param {number} m
   * @returns {Schedule | string}
   */
  schedule(v, p, m) {
    const key = `${v},${p},${m}`;
    const place = this.places.get(key);
    if (!place) return this.data.refused[key];
    const { rank_of_stage: rankOfStage, parts } = this.layer(v, p);
    let { from } = place;
    const orders = Array.from({ length: p }, (_, rank) => {
      const stages = rankOfStage.flatMap((holder, stage) => (holder === rank ? [stage] : []));
      const length = this.columns.length[place.lists + rank];
      const order = this.readOrder(from, length, stages);
      from += length;
      return order;
    });
    const edges = edgesOf(parts);
    return new Schedule(this.name, orders, { rankOfStage, parts, edges, microbatches: m });
  }

  /** @param {number} from @param {number} length @param {number[]} stages @returns {Work[]} */
  readOrder(from, length, stages) {
    /** @type {Work[]} */
    const order = [];
    const next = new Int32Array(stages.length * LETTERS.length);
    for (let at = from; at < from + length; at++) {
      const token = this.columns.token[at];
      const [kind, local] = [token & 3, token >> 3];
      const counter = local * LETTERS.length + kind;
      const microbatch = next[counter] + this.columns.skip[at];
      next[counter] = microbatch + 1;
      const action = { kind, stage: stages[local], microbatch };
      if (token & 4) order[order.length - 1].push(action);
      else order.push([action]);
    }
    return order;
  }
}

/** Every part feeds the next one of its copy of the model. @param {number[]} parts @returns {Edge[]} */
function edgesOf(parts) {
  return parts.flatMap((part, stage) => {
    return parts[stage + 1] === part + 1 ? [/** @type {Edge} */ ([stage, stage + 1])] : [];
  });
}
