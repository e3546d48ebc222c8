// What the search box understands: 2F5, 2F, F5, rank 3, stage 2, microbatch 4.

/** What is asked for, as a question about a row of a timeline, or nothing where it means nothing. */
function parseQuery(text, kinds) {
  const words = text.trim().toUpperCase();
  const place = /^(RANK|STAGE|MICROBATCH)\s*(\d+)$/.exec(words);
  if (place) {
    const number = Number(place[2]);
    if (place[1] === "RANK") return (timeline, row) => timeline.rank[row] === number;
    if (place[1] === "STAGE") return (timeline, row) => timeline.stage(row) === number;
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

/** The rows of a timeline for which a question holds. */
function findRows(timeline, question) {
  const found = [];
  for (let row = 0; row < timeline.numRows; row++) if (question(timeline, row)) found.push(row);
  return found;
}
