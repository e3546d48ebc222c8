// What every rank does at a moment of the step, and what it waits for, in words.

const DOING = ["forward", "backward for inputs", "backward for weights", "backward"];

/** @typedef {{state: "runs" | "waits" | "done" | "stuck", row: number, text: string}} Moment */

/** @param {Timeline} timeline @param {number} rank @param {number} time @returns {Moment} */
function momentOf(timeline, rank, time) {
  const { schedule, start, end } = timeline;
  for (let row = schedule.first[rank]; row < schedule.first[rank + 1]; row = schedule.work(row)[1]) {
    if (Number.isNaN(start[row])) return { state: "stuck", row, text: stuckText(timeline, row) };
    if (time < start[row]) return { state: "waits", row, text: waitText(timeline, row, time) };
    if (time < end[row]) {
      const text = `runs ${describeWork(schedule, row)} until ${formatTime(end[row])} s`;
      return { state: "runs", row, text };
    }
  }
  const isLast = time >= timeline.seconds;
  return { state: "done", row: NONE, text: isLast ? "is done" : "is done, and idle until the last rank ends" };
}

/** @param {Schedule} schedule @param {number} row */
function describeWork(schedule, row) {
  const [from, to] = schedule.work(row);
  const parts = [];
  for (let member = from; member < to; member++) {
    const stage = schedule.mostStages > 1 ? `, stage ${schedule.stage[member]}` : "";
    const what = DOING[schedule.kind[member]];
    parts.push(`${schedule.text(member)} (${what} of microbatch ${schedule.microbatch[member]}${stage})`);
  }
  return parts.join(" together with ");
}

/** @param {Timeline} timeline @param {number} row @param {number} time */
function waitText(timeline, row, time) {
  const { schedule, graph, start, end } = timeline;
  const slot = timeline.lateNeed(row);
  const next = workText(schedule.orders[schedule.rank[row]][schedule.position[row]]);
  if (slot === NONE) return `has ${next} next`;
  const other = graph.need[slot];
  const where = graph.isRemote[slot] ? ` from rank ${schedule.rank[other]}` : "";
  const what = `${schedule.text(other)}${where}`;
  let when = `starts at ${formatTime(start[other])} s`;
  if (time >= end[other]) when = `is on its way until ${formatTime(timeline.arrival(slot))} s`;
  else if (time >= start[other]) when = `runs until ${formatTime(end[other])} s`;
  return `waits: ${next} needs ${what}, which ${when}`;
}

/** @param {Timeline} timeline @param {number} row */
function stuckText(timeline, row) {
  const { schedule, graph, start } = timeline;
  const [from, to] = schedule.work(row);
  for (let slot = graph.first[from]; slot < graph.first[to]; slot++) {
    const other = graph.need[slot];
    if (other === NONE) return `is stuck: ${schedule.text(row)} needs work that is missing`;
    if (Number.isNaN(start[other])) {
      return `is stuck: ${schedule.text(row)} needs ${schedule.text(other)} on rank ${schedule.rank[other]}, which never runs`;
    }
  }
  return `is stuck behind ${schedule.text(row)}`;
}

/** Return the times at which anything starts or ends, in order. @param {Timeline} timeline */
function momentsOf(timeline) {
  const times = [...timeline.start, ...timeline.end].filter((time) => !Number.isNaN(time));
  return [...new Set(times)].sort((one, other) => one - other);
}
