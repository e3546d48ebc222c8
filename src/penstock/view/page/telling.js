// What the page says of an action in words: beside the pointer, and below the pictures.

// How many actions of a chain get a button.
const MOST_LINKS = 120;

/** An element with some text or other elements in it. Text is never read as HTML. */
function make(tag, content = [], attributes = {}) {
  const element = document.createElement(tag);
  element.append(...[content].flat());
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A list of facts, without those that are empty. */
function makeFacts(facts) {
  const known = facts.filter(([, value]) => value !== "");
  return make("dl", known.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

/** An action on its rank, such as "2F5 on rank 2". */
function placeText(timeline, row) {
  return `${timeline.text(row)} on rank ${timeline.rank[row]}`;
}

function placeTexts(timeline, rows) {
  return rows.map((row) => placeText(timeline, row)).join(", ");
}

function timeText(timeline, row) {
  const [start, end] = [timeline.start[row], timeline.end[row]];
  return `${formatTime(start)} to ${formatTime(end)}`;
}

/** What an action waited for, in words. */
function waitText(timeline, row) {
  const need = timeline.waitedFor(row);
  if (need !== NOTHING) {
    return `${placeText(timeline, need)}, which ended at ${formatTime(timeline.end[need])}`;
  }
  if (timeline.followsAtOnce(row)) return "nothing; its rank was busy until it started";
  return timeline.needs(row).length ? "nothing; all that it needs was there" : "nothing";
}

function factsOf(timeline, row) {
  const seconds = timeline.end[row] - timeline.start[row];
  return [
    ["time", `${timeText(timeline, row)} (${formatTime(seconds)})`],
    ["holds", formatMemory(timeline.memory[row], timeline.memoryUnit)],
    ["needs", placeTexts(timeline, timeline.needs(row))],
    ["waited for", waitText(timeline, row)],
    ["awaited by", placeTexts(timeline, timeline.users(row))],
  ];
}

function headingOf(timeline, row) {
  const label = timeline.kinds[timeline.kind(row)].label;
  return [make("strong", timeline.text(row)), ` ${label}, rank ${timeline.rank[row]}`];
}

/** What stands beside the pointer: an action, or why the rank is idle there. */
function tellPoint(timeline, row, next) {
  if (row !== NOTHING) {
    return [make("div", headingOf(timeline, row)), makeFacts(factsOf(timeline, row))];
  }
  const [text, need] = [timeline.text(next), timeline.waitedFor(next)];
  const until = `idle until ${formatTime(timeline.start[next])}`;
  const reason = need === NOTHING ? `then ${text}` : `${text} waits for ${placeText(timeline, need)}`;
  return [make("div", make("strong", until)), make("div", reason)];
}

/** What stands below the pictures of a selected action, with its chain as buttons. */
function tellSelection(panels, selected, chain, choose) {
  const { timeline } = panels[selected.panel];
  const facts = factsOf(timeline, selected.row);
  for (const { panel, row } of selected.twins) {
    const other = panels[panel].timeline;
    facts.splice(1, 0, [`time in ${other.title}`, twinText(timeline, selected.row, other, row)]);
  }
  const last = Math.max(0, chain.length - MOST_LINKS);
  const from = clamp(chain.indexOf(selected.row) - MOST_LINKS / 2, 0, last);
  const links = chain.slice(from, from + MOST_LINKS).map((row) => {
    const title = `rank ${timeline.rank[row]}, ${timeText(timeline, row)}`;
    const button = make("button", timeline.text(row), { type: "button", title });
    if (row === selected.row) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(row));
    return make("li", button);
  });
  const nearest = chain.length > MOST_LINKS ? `; the nearest ${MOST_LINKS}` : "";
  const actions = chain.length === 2 ? "action" : "actions";
  const count = `Depends on or leads to ${chain.length - 1} ${actions}${nearest}:`;
  return [
    make("h2", headingOf(timeline, selected.row), { id: "details-title" }),
    makeFacts(facts),
    make("p", count),
    make("ol", links),
  ];
}

/** When the same action runs in another timeline, and how much longer it takes there. */
function twinText(timeline, row, other, twin) {
  const there = other.end[twin] - other.start[twin];
  const more = there - (timeline.end[row] - timeline.start[row]);
  const difference = `${more < 0 ? "−" : "+"}${formatTime(Math.abs(more))}`;
  return `${timeText(other, twin)} (${formatTime(there)}, ${difference})`;
}
