// Descriptions of an action: in the tooltip, and below the pictures.

// The most actions of a chain that get a button.
const MAX_LINKS = 120;

/**
 * Make an element with text or other elements in it; text is never parsed as HTML.
 * @param {string} tag @param {string | Node | (string | Node)[]} content @param {Record<string, string>} attributes
 */
function make(tag, content = [], attributes = {}) {
  const element = document.createElement(tag);
  element.append(...[content].flat());
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Make a list of facts, leaving out empty ones. */
function makeFacts(facts) {
  const known = facts.filter(([, value]) => value !== "");
  return make("dl", known.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

/** Return an action with its rank, such as "2F5 on rank 2". */
function actionOnRank(timeline, row) {
  return `${timeline.text(row)} on rank ${timeline.rank[row]}`;
}

function actionsOnRanks(timeline, rows) {
  return rows.map((row) => actionOnRank(timeline, row)).join(", ");
}

function timeText(timeline, row) {
  const [start, end] = [timeline.start[row], timeline.end[row]];
  return `${formatTime(start)} to ${formatTime(end)} s`;
}

/** Describe what an action waited for. */
function waitText(timeline, row) {
  const need = timeline.waitedFor(row);
  if (need !== NOTHING) {
    return `${actionOnRank(timeline, need)}, which ended at ${formatTime(timeline.end[need])} s`;
  }
  if (timeline.followsAtOnce(row)) return "nothing; its rank was busy until it started";
  return timeline.needs(row).length ? "nothing; every input was there" : "nothing";
}

function factsOf(timeline, row) {
  const seconds = timeline.end[row] - timeline.start[row];
  return [
    ["time", `${timeText(timeline, row)} (${formatTime(seconds)} s)`],
    ["memory", formatMemory(timeline.memory[row], timeline.memoryUnit)],
    ["depends on", actionsOnRanks(timeline, timeline.needs(row))],
    ["waited for", waitText(timeline, row)],
    ["needed by", actionsOnRanks(timeline, timeline.users(row))],
  ];
}

function headingOf(timeline, row) {
  const label = timeline.kinds[timeline.kind(row)].label;
  return [make("strong", timeline.text(row)), ` ${label}, rank ${timeline.rank[row]}`];
}

/** Describe the action under the pointer. */
function describeAction(timeline, row) {
  return [make("div", headingOf(timeline, row)), makeFacts(factsOf(timeline, row))];
}

/** Describe what a rank holds at a time, and what it runs meanwhile. */
function describeMemory(panel, rank, time, row) {
  const { timeline } = panel;
  const held = formatMemory(panel.heldAt(rank, time), timeline.memoryUnit);
  const runs = row === NOTHING ? "idle" : `runs ${timeline.text(row)}`;
  return [make("div", make("strong", `holds ${held}`)), make("div", `rank ${rank} at ${formatTime(time)} s; ${runs}`)];
}

/** Describe why a rank is idle until its next action. */
function describeIdle(timeline, next) {
  if (next === NOTHING) {
    return [make("div", make("strong", "done")), make("div", `idle until the step ends at ${formatTime(timeline.seconds)} s`)];
  }
  const [text, need] = [timeline.text(next), timeline.waitedFor(next)];
  const until = `idle until ${formatTime(timeline.start[next])} s`;
  const copy = timeline.copyBefore(next);
  const reason =
    need !== NOTHING ? `${text} waits for ${actionOnRank(timeline, need)}`
    : copy !== NOTHING ? `${text} waits until ${timeline.text(copy)} is done`
    : `then ${text}`;
  return [make("div", make("strong", until)), make("div", reason)];
}

/** Describe the selected action below the pictures, with its chain as buttons. */
function describeSelection(panels, selected, chain, choose) {
  const { timeline } = panels[selected.panel];
  const facts = factsOf(timeline, selected.row);
  for (const { panel, row } of selected.twins) {
    const other = panels[panel].timeline;
    facts.splice(1, 0, [`time in ${other.title}`, twinText(timeline, selected.row, other, row)]);
  }
  const last = Math.max(0, chain.length - MAX_LINKS);
  const from = clamp(chain.indexOf(selected.row) - MAX_LINKS / 2, 0, last);
  const links = chain.slice(from, from + MAX_LINKS).map((row) => {
    const title = `rank ${timeline.rank[row]}, ${timeText(timeline, row)}`;
    const button = make("button", timeline.text(row), { type: "button", title });
    if (row === selected.row) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(row));
    return make("li", button);
  });
  const nearest = chain.length > MAX_LINKS ? `; the nearest ${MAX_LINKS}` : "";
  const actions = chain.length === 2 ? "action" : "actions";
  const count = `Depends on or leads to ${chain.length - 1} ${actions}${nearest}:`;
  return [
    make("h2", headingOf(timeline, selected.row), { id: "details-title" }),
    makeFacts(facts),
    make("p", count),
    make("ol", links),
  ];
}

/** Say when the same action runs in another timeline, and how much longer it takes there. */
function twinText(timeline, row, other, twin) {
  const there = other.end[twin] - other.start[twin];
  const more = there - (timeline.end[row] - timeline.start[row]);
  const difference = `${more < 0 ? "−" : "+"}${formatTime(Math.abs(more))}`;
  return `${timeText(other, twin)} (${formatTime(there)} s, ${difference} s)`;
}
