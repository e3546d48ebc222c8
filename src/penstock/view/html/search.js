// The queries of the search box: 2F5, 2F, F5, rank 3, stage 2, microbatch 4.

/** Return a query as a condition on a row of a timeline, or undefined if it is invalid. */
function parseQuery(text, kinds) {
  const words = text.trim().toUpperCase();
  const match = /^(RANK|STAGE|MICROBATCH)\s*(\d+)$/.exec(words);
  if (match) {
    const number = Number(match[2]);
    if (match[1] === "RANK") return (timeline, row) => timeline.rank[row] === number;
    if (match[1] === "STAGE") return (timeline, row) => timeline.stage(row) === number;
    return (timeline, row) => timeline.microbatch[row] === number;
  }
  const action = /^(\d*)([A-Z_]+)(\d*)$/.exec(words);
  const kind = kinds.findIndex((each) => each.text === action?.[2]);
  if (kind < 0) return undefined;
  const [stage, microbatch] = [action[1], action[3]];
  return (timeline, row) =>
    timeline.kind(row) === kind &&
    (stage === "" || timeline.stage(row) === Number(stage)) &&
    (microbatch === "" || timeline.microbatch[row] === Number(microbatch));
}

/** Return the rows of a timeline that meet a condition. */
function findRows(timeline, condition) {
  const found = [];
  for (let row = 0; row < timeline.numRows; row++) if (condition(timeline, row)) found.push(row);
  return found;
}
