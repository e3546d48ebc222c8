// Schedules as CSV: a line per rank, a cell per action; like ir/text.py.

const ACTION = /^([0-9]{1,9})(F|I|W|B)([0-9]{1,9})$/;
// What lowering adds. The page prices transfers by itself, so these are left out.
const ADDED = /^([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]{1,9})?(>[0-9]{1,9})?$/;
// Python's schedules have these too, with memory on the host that the page does not know.
const SAVED = /^[0-9]{1,9}(RECOMPUTE|OFFLOAD|RELOAD)[0-9]{1,9}$/;
const OVERLAP = /^\(([^()]*)\)OVERLAP_F_B$/;
const DATAFLOW = /^# dataflow:((?: +[0-9]{1,9}>[0-9]{1,9})*) *\| *parts:((?: +[0-9]{1,9})*)$/;
const MOST_ACTIONS = 20000;
const MOST_RANKS = 256;
const MOST_LETTERS = 1000000;
// Checks keep a number per stage and microbatch, which few actions can name many of.
const MOST_PAIRS = 200000;

/** @param {Schedule} schedule */
function formatCsv(schedule) {
  const { edges, parts } = schedule.layout;
  const isChain =
    edges.length === parts.length - 1 &&
    edges.every(([from, to], at) => from === at && to === at + 1) &&
    parts.every((part, stage) => part === stage);
  const flow = edges.map(([from, to]) => `${from}>${to}`).join(" ");
  const head = isChain ? [] : [`# dataflow: ${flow} | parts: ${parts.join(" ")}`];
  const lines = schedule.orders.map((order) => order.map(workText).join(","));
  return `${[...head, ...lines].join("\n")}\n`;
}

/**
 * Read a schedule; `left` counts the actions that are left out. Throws an error with Python's words.
 * @param {string} text @param {string} name @param {Record<string, string>} wording
 * @returns {{schedule: Schedule, left: number}}
 */
function parseCsv(text, name, wording) {
  refuseMoreThan("letters", text.length, MOST_LETTERS);
  const lines = text.trimEnd().split(/\r\n|\n|\r/);
  let head = null;
  if (lines[0].trimStart().startsWith("#")) {
    head = DATAFLOW.exec(lines[0].trim());
    if (!head) throw new Error(`not a valid dataflow: '${lines[0].trim()}'; write # dataflow: 0>1 1>2 | parts: 0 1 2`);
    lines.shift();
  }
  if (lines.join("").trim() === "") throw new Error(wording.empty);
  refuseMoreThan("ranks", lines.length, MOST_RANKS);
  let left = 0;
  const orders = lines.map((line, rank) => {
    // Cells that are copied from a spreadsheet have tabs between them.
    return line.split(/[,\t]/).flatMap((cell, column) => {
      const stripped = cell.trim().replace(/^"(.*)"$/, "$1").trim();
      if (stripped === "") return [];
      if (ADDED.test(stripped)) return (left += 1), [];
      const work = parseWork(stripped);
      if (work) return [work];
      if (SAVED.test(stripped)) {
        throw new Error(`the page takes no actions that recompute or offload (got ${stripped}); use penstock show`);
      }
      const error = fill(wording.action, { text: `'${stripped.slice(0, 60)}'` });
      throw new Error(fill(wording.cell, { rank, cell: column, error }));
    });
  });
  const edges = head?.[1].trim().split(/ +/).filter(Boolean).map((edge) => edge.split(">").map(Number));
  const parts = head?.[2].trim().split(/ +/).filter(Boolean).map(Number);
  return { schedule: readOrders(orders, name, wording, parts, /** @type {Edge[]} */ (edges)), left };
}

/** Refuse what the page is too slow for. @param {string} what @param {number} count @param {number} most */
function refuseMoreThan(what, count, most) {
  if (count > most) throw new Error(`the page takes at most ${most} ${what} (got ${count}); use penstock show`);
}

/** @param {string} text @returns {Work | undefined} */
function parseWork(text) {
  const group = OVERLAP.exec(text);
  const members = (group ? group[1].split(";") : [text]).map((each) => ACTION.exec(each.trim()));
  if (members.some((match) => !match) || (group && members.length < 2)) return undefined;
  return members.map((match) => {
    const [, stage, letter, microbatch] = /** @type {string[]} */ (/** @type {unknown} */ (match));
    return { kind: LETTERS.indexOf(letter), stage: Number(stage), microbatch: Number(microbatch) };
  });
}

/**
 * Read placement and microbatches off the lists, like `Schedule.from_orders`.
 * @param {Orders} orders @param {string} name @param {Record<string, string>} wording
 * @param {number[]} [parts] @param {Edge[]} [edges]
 */
function readOrders(orders, name, wording, parts, edges) {
  const actions = orders.flat(2).length;
  refuseMoreThan("actions", actions, MOST_ACTIONS);
  const rankOfStage = readPlacement(orders, actions, wording);
  const microbatches = Math.max(...orders.flat(2).map((action) => action.microbatch)) + 1;
  if (microbatches > actions) {
    throw new Error(fill(wording["microbatch gap"], { microbatch: microbatches - 1, actions }));
  }
  refuseMoreThan("stages times microbatches", rankOfStage.length * microbatches, MOST_PAIRS);
  const numbered = parts ?? rankOfStage.map((_, stage) => stage);
  if (numbered.length !== rankOfStage.length) {
    throw new Error(`parts must have one number per stage (stages: ${rankOfStage.length}, parts: ${numbered.length})`);
  }
  const layout = { rankOfStage, parts: numbered, edges: edges ?? edgesOf(numbered), microbatches };
  return new Schedule(name, orders, layout);
}

/** @param {Orders} orders @param {number} actions @param {Record<string, string>} wording */
function readPlacement(orders, actions, wording) {
  const stages = orders.flat(2).map((action) => action.stage);
  if (!stages.length) throw new Error(wording["no compute"]);
  const last = Math.max(...stages);
  if (last >= actions) throw new Error(fill(wording["stage gap"], { stage: last, actions }));
  const holder = new Array(last + 1).fill(NONE);
  orders.forEach((order, rank) => order.flat().forEach((action) => (holder[action.stage] = rank)));
  const missing = holder.indexOf(NONE);
  if (missing >= 0) throw new Error(fill(wording["stage missing"], { stage: missing, last }));
  orders.forEach((order, rank) => {
    order.forEach((work, position) => {
      for (const { kind, stage, microbatch } of work) {
        if (holder[stage] === rank) continue;
        const action = `${stage}${LETTERS[kind]}${microbatch}`;
        const values = { rank, position, action, stage, other: holder[stage] };
        throw new Error(fill(wording["stage twice"], values));
      }
    });
  });
  const idle = orders.findIndex((_, rank) => !holder.includes(rank));
  if (idle >= 0) throw new Error(fill(wording["idle rank"], { rank: idle }));
  return holder;
}
