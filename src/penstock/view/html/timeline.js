// One timeline: its rows with times and dependencies. Times count from the first start.

const NOTHING = -1;

class Timeline {
  constructor(data, columns, kinds) {
    this.title = data.name;
    this.begin = data.begin;
    this.tick = data.tick;
    this.memoryUnit = data.memory_unit;
    this.kinds = kinds;
    this.first = columns.first;
    this.numRanks = this.first.length - 1;
    this.numRows = this.first[this.numRanks];
    this.names = { kind: columns.name_kind, stage: columns.name_stage, peer: columns.name_peer };
    this.shape = sums(columns.shape);
    this.shapeName = columns.shape_name;
    this.name = pick(this.shapeName, this.shape);
    this.kindOfRow = pick(this.names.kind, this.name);
    this.shapeFirst = bounds(columns.shape_size);
    this.shapeNeed = columns.shape_need;
    this.microbatch = sums(columns.microbatch);
    this.microbatches = data.microbatches;
    this.joined = columns.joined;
    this.late = columns.late;
    this.critical = columns.critical;
    this.localStageOf = localStages(data.rank_of_stage);
    this.rank = ranksOf(this.first);
    const times = timesOf(columns, data.tick);
    this.start = times[0];
    this.end = times[1];
    this.memory = scaled(sums(columns.memory), data.memory_tick);
    this.seconds = largest(this.end) || 1;
    this.mostMemory = largest(this.memory) || 1;
    this.rowOfName = this.indexRows();
    this.usersOfName = this.indexUsers();
  }

  kind(row) {
    return this.kindOfRow[row];
  }

  stage(row) {
    return this.names.stage[this.name[row]];
  }

  /** Return the action as text, such as 2F5. */
  text(row) {
    const [stage, peer] = [this.stage(row), this.names.peer[this.name[row]]];
    const microbatch = this.microbatch[row] === NOTHING ? "" : this.microbatch[row];
    // A message between neighbouring stages omits its other end.
    const other = peer === NOTHING || Math.abs(peer - stage) === 1 ? "" : `>${peer}`;
    return stage + this.kinds[this.kind(row)].text + microbatch + other;
  }

  /** Return the row with this name and microbatch, or -1. */
  findRow(name, microbatch) {
    return microbatch < 0 ? NOTHING : this.rowOfName[name * this.microbatches + microbatch];
  }

  /** Return the rows that a row depends on; all belong to its own microbatch. */
  needs(row) {
    const shape = this.shape[row];
    const names = this.shapeNeed.subarray(this.shapeFirst[shape], this.shapeFirst[shape + 1]);
    return Array.from(names, (name) => this.findRow(name, this.microbatch[row]));
  }

  /** Return the rows that depend on a row. */
  users(row) {
    return this.usersOfName[this.name[row]]
      .map((name) => this.findRow(name, this.microbatch[row]))
      .filter((user) => user !== NOTHING && this.needs(user).includes(row))
      .sort((one, other) => this.start[one] - this.start[other] || one - other);
  }

  /** Return the first and the last row of the overlap that a row belongs to. */
  work(row) {
    let [from, to] = [row, row];
    while (this.joined[from]) from--;
    while (to + 1 < this.numRows && this.joined[to + 1]) to++;
    return [from, to];
  }

  /** Return the dependency that a row waited for, or -1 if its rank was busy until then. */
  waitedFor(row) {
    const [from, to] = this.work(row);
    for (let member = from; member <= to; member++) {
      if (this.late[member]) return this.needs(member)[this.late[member] - 1];
    }
    return NOTHING;
  }

  /** Whether a row starts as soon as its rank has finished the previous row. */
  followsAtOnce(row) {
    const [from] = this.work(row);
    const before = from - 1;
    return before >= this.first[this.rank[row]] && this.start[from] - this.end[before] <= this.tick;
  }

  /** Return the copy to or from the host that ends right before a row on its rank, or -1. */
  copyBefore(row) {
    if (!this.followsAtOnce(row)) return NOTHING;
    const before = this.work(row)[0] - 1;
    return this.kinds[this.kind(before)].strip ? before : NOTHING;
  }

  /** Return a row with everything it depends on and everything that depends on it, by time. */
  chain(row) {
    const found = new Set([row]);
    for (const step of [(each) => this.needs(each), (each) => this.users(each)]) {
      const waiting = [row];
      while (waiting.length) {
        for (const next of step(waiting.pop())) {
          if (!found.has(next)) {
            found.add(next);
            waiting.push(next);
          }
        }
      }
    }
    return [...found].sort((one, other) => this.start[one] - this.start[other] || one - other);
  }

  indexRows() {
    const table = new Int32Array(this.names.kind.length * this.microbatches).fill(NOTHING);
    for (let row = 0; row < this.numRows; row++) {
      if (this.microbatch[row] >= 0) {
        table[this.name[row] * this.microbatches + this.microbatch[row]] = row;
      }
    }
    return table;
  }

  /** Return, for every name, the names of rows that may depend on it. */
  indexUsers() {
    const users = Array.from(this.names.kind, () => new Set());
    for (let shape = 0; shape < this.shapeName.length; shape++) {
      for (let at = this.shapeFirst[shape]; at < this.shapeFirst[shape + 1]; at++) {
        users[this.shapeNeed[at]].add(this.shapeName[shape]);
      }
    }
    return users.map((names) => [...names]);
  }
}

/** Return starts and ends in seconds from gaps and durations in ticks; see data.py. */
function timesOf({ first, gap, duration, joined }, tick) {
  const [start, end] = [new Float64Array(gap.length), new Float64Array(gap.length)];
  for (let rank = 0; rank + 1 < first.length; rank++) {
    let [startBefore, endBefore] = [0, 0];
    for (let row = first[rank]; row < first[rank + 1]; row++) {
      startBefore = (joined[row] ? startBefore : endBefore) + gap[row];
      endBefore = startBefore + duration[row];
      start[row] = startBefore * tick;
      end[row] = endBefore * tick;
    }
  }
  return [start, end];
}

function largest(column) {
  let most = 0;
  for (let at = 0; at < column.length; at++) if (column[at] > most) most = column[at];
  return most;
}

function ranksOf(first) {
  const rank = new Int32Array(first[first.length - 1]);
  for (let at = 0; at + 1 < first.length; at++) rank.fill(at, first[at], first[at + 1]);
  return rank;
}

/** Return the index of every stage among the stages of its rank. */
function localStages(rankOfStage) {
  const held = new Map();
  return rankOfStage.map((rank) => {
    const index = held.get(rank) ?? 0;
    held.set(rank, index + 1);
    return index;
  });
}
