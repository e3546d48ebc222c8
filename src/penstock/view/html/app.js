// The state of the page: what is selected, found and shown, and when it is drawn.

class App {
  constructor(panels, settings) {
    this.panels = panels;
    this.settings = settings;
    this.selected = null;
    this.lit = panels.map(() => null);
    this.hovered = { panel: NOTHING, row: NOTHING };
    this.found = { query: "", matches: [], at: NOTHING };
    this.showsCritical = false;
    this.showsMoved = false;
    this.range = null;
    // Memory curves are worth their space only with few lanes.
    this.showsMemory = panels.every((panel) => panel.timeline.numRanks <= 16);
    this.waiting = [];
    shareMemoryScale(panels.map((panel) => panel.timeline));
    const whole = Math.max(...panels.map((panel) => panel.timeline.seconds));
    const tick = Math.max(...panels.map((panel) => panel.timeline.tick));
    // A pixel is at least a tick wide, so that rounding to ticks stays invisible.
    this.window = new TimeWindow(whole, 4096 * tick, () => this.draw());
    for (const panel of panels) {
      connectPointers(panel, this.window, this);
      panel.element.addEventListener("scroll", () => this.draw());
    }
    new ResizeObserver(() => this.resize()).observe(panels[0].element.parentElement);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.setTheme(dark.matches ? "dark" : "light"));
    this.setTheme(dark.matches ? "dark" : "light");
    this.resize();
  }

  resize() {
    const share = this.panels.length > 1 ? 0.42 : 0.64;
    const room = Math.max(160, innerHeight * share);
    for (const panel of this.panels) panel.resize(this.window, room, this.showsMemory);
    press("memory", this.showsMemory);
    this.draw();
  }

  /** Draw everything in the next frame, once, however often this is called. */
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.window.step();
      for (const panel of this.panels) panel.paint(this.colours);
      this.paintMarks();
      if (this.window.isMoving) this.draw();
      else this.waiting.splice(0).forEach((resolve) => resolve());
    });
  }

  paintMarks() {
    this.panels.forEach((panel, at) => panel.paintMarks(this.marks(at), this.colours));
  }

  /** Return the marks of a panel. */
  marks(at) {
    return {
      lit: this.lit[at],
      selected: this.selectedRow(at),
      hovered: this.hovered.panel === at ? this.hovered.row : NOTHING,
      showsCritical: this.showsCritical,
      range: this.range,
    };
  }

  /** Return the selected row of a panel, or the same action in another timeline. */
  selectedRow(at) {
    if (!this.selected) return NOTHING;
    if (this.selected.panel === at) return this.selected.row;
    return this.selected.twins.find((twin) => twin.panel === at)?.row ?? NOTHING;
  }

  /** Resolve when everything is drawn and nothing moves. */
  settle() {
    return new Promise((resolve) => {
      this.waiting.push(resolve);
      this.draw();
    });
  }

  hover(panel, event) {
    const { timeline, bars } = panel;
    const { time, lane, isOnLanes, isOnMemory } = panel.point(event);
    const row = isOnLanes ? bars.at(time, lane) : NOTHING;
    const rank = clamp(Math.round(lane), 0, timeline.numRanks - 1);
    this.hovered = { panel: this.panels.indexOf(panel), row: isOnMemory ? NOTHING : row };
    const isInStep = isOnLanes && time >= 0 && time <= timeline.seconds;
    if (!isInStep && row === NOTHING) hideTip();
    else if (isOnMemory) showTip(describeMemory(panel, rank, time, row), event);
    else if (row !== NOTHING) showTip(describeAction(timeline, row), event);
    else showTip(describeIdle(timeline, bars.after(rank, time)), event);
    this.paintMarks();
  }

  /** Mark a range of time, or none. */
  showRange(from, to) {
    this.range = from === null ? null : [from, to];
    this.paintMarks();
  }

  leave() {
    this.hovered = { panel: NOTHING, row: NOTHING };
    hideTip();
    this.paintMarks();
  }

  click(panel, event) {
    const { time, lane, isOnLanes, isOnLabel } = panel.point(event);
    if (isOnLabel) return this.collapse(Math.round(lane));
    const row = isOnLanes ? panel.bars.at(time, lane) : NOTHING;
    if (row === NOTHING) this.clear();
    else this.select(this.panels.indexOf(panel), row);
    return undefined;
  }

  /** Collapse a rank in every panel; the last one stays. */
  collapse(rank) {
    for (const { hiddenRanks, lanes } of this.panels) if (lanes.numRanks > 1) hiddenRanks.add(rank);
    this.showRanks();
  }

  expandAll() {
    for (const { hiddenRanks } of this.panels) hiddenRanks.clear();
    this.showRanks();
  }

  showRanks() {
    this.resize();
    const hidden = [...this.panels[0].hiddenRanks].sort((one, other) => one - other);
    document.getElementById("expand").hidden = !hidden.length;
    say(hidden.length ? `Collapsed: rank ${hidden.join(", ")}` : "All ranks are shown");
  }

  /** Select an action with its chain, here and in the other timelines that have it. */
  select(at, row) {
    const { timeline } = this.panels[at];
    const twins = [];
    this.panels.forEach((panel, other) => {
      const twin = other === at ? NOTHING : findTwin(timeline, row, panel.timeline);
      if (twin !== NOTHING) twins.push({ panel: other, row: twin });
    });
    this.selected = { panel: at, row, twins };
    this.showsMoved = false;
    press("moved", false);
    this.panels.forEach((panel, each) => {
      const chosen = this.selectedRow(each);
      this.lit[each] = chosen === NOTHING ? null : lightRows(panel, panel.timeline.chain(chosen));
    });
    const details = document.getElementById("details");
    const chain = timeline.chain(row);
    const goTo = (next) => this.goTo(at, next);
    details.replaceChildren(...describeSelection(this.panels, this.selected, chain, goTo));
    details.hidden = false;
    const where = `${actionOnRank(timeline, row)}, ${timeText(timeline, row)}`;
    say(`${where}; waited for ${waitText(timeline, row)}`);
    this.paintMarks();
  }

  goTo(at, row) {
    this.reveal(at, row);
    this.select(at, row);
  }

  clear() {
    this.selected = null;
    this.lit.fill(null);
    this.showsMoved = false;
    press("moved", false);
    this.found = { query: "", matches: [], at: NOTHING };
    document.getElementById("details").hidden = true;
    hideTip();
    say("");
    this.paintMarks();
  }

  /** Zoom around the selected action, or the middle of what is shown. */
  zoom(factor) {
    const { goalLeft, goalRight } = this.window;
    let share = 0.5;
    if (this.selected) {
      const { timeline } = this.panels[this.selected.panel];
      const { row } = this.selected;
      const middle = (timeline.start[row] + timeline.end[row]) / 2;
      if (goalLeft <= middle && middle <= goalRight) share = (middle - goalLeft) / (goalRight - goalLeft);
    }
    this.window.zoom(factor, share);
  }

  /** Scroll a row into view, and zoom in if it is too narrow to see. */
  reveal(at, row) {
    const { timeline } = this.panels[at];
    const [start, seconds] = [timeline.start[row], timeline.end[row] - timeline.start[row]];
    const isVisible = start >= this.window.goalLeft && timeline.end[row] <= this.window.goalRight;
    const shown = this.window.goalRight - this.window.goalLeft;
    const isWide = seconds / shown > 0.008 || seconds === 0;
    if (!isVisible || !isWide) {
      const span = isWide ? shown : clamp(seconds * 40, this.window.finest, this.window.whole);
      this.window.show(start + seconds / 2 - span / 2, span);
    }
    if (this.panels[at].hiddenRanks.has(timeline.rank[row])) this.expandAll();
    this.panels[at].reveal(timeline.rank[row]);
    this.panels[at].element.scrollIntoView({ block: "nearest" });
  }

  /** Find what a query asks for; for the same query again, go to the next match. */
  search(query) {
    if (query.trim() === "") return this.clear();
    if (query !== this.found.query && !this.startSearch(query)) return undefined;
    const { matches } = this.found;
    this.found.at = (this.found.at + 1) % matches.length;
    const { panel, row } = matches[this.found.at];
    const { timeline } = this.panels[panel];
    this.reveal(panel, row);
    // A single action is selected with its chain; several matches are announced one by one.
    const isOneAction = new Set(matches.map((match) => match.panel)).size === matches.length;
    if (isOneAction) return this.select(panel, row);
    const where = `${actionOnRank(timeline, row)}, ${timeText(timeline, row)}`;
    say(`${this.found.at + 1} of ${matches.length}: ${where}`);
    this.paintMarks();
    return undefined;
  }

  startSearch(query) {
    this.clear();
    const condition = parseQuery(query, this.settings.kinds);
    if (!condition) return say("Not a valid search; try 2F5, F5, rank 3 or microbatch 4"), false;
    const rows = this.panels.map((panel) => findRows(panel.timeline, condition));
    const matches = rows.flatMap((found, panel) => found.map((row) => ({ panel, row })));
    if (!matches.length) return say("Nothing found"), false;
    this.found = { query, matches, at: NOTHING };
    this.panels.forEach((panel, at) => {
      this.lit[at] = lightRows(panel, rows[at]);
    });
    return true;
  }

  /** Select the neighbour of the selected action: on its rank, or at its time on the next rank. */
  walk(at, across, down) {
    const { timeline, bars } = this.panels[at];
    const from = this.selected?.panel === at ? this.selected.row : NOTHING;
    if (from === NOTHING) return this.selectFirst(at);
    const rank = clamp(timeline.rank[from] + down, 0, timeline.numRanks - 1);
    const line = bars.rows.subarray(bars.first[rank], bars.first[rank + 1]);
    const isLater = (each) => timeline.start[line[each]] > timeline.start[from];
    const index = down ? findFirst(0, line.length, isLater) - 1 : line.indexOf(from) + across;
    return line.length ? this.goTo(at, line[clamp(index, 0, line.length - 1)]) : undefined;
  }

  selectFirst(at) {
    const { lanes, bars } = this.panels[at];
    const row = bars.after(lanes.visibleRanks[0], this.window.goalLeft);
    if (row !== NOTHING) this.goTo(at, row);
  }

  toggleCritical() {
    this.showsCritical = !this.showsCritical;
    press("critical", this.showsCritical);
    this.paintMarks();
  }

  toggleMemory() {
    this.setMemory(!this.showsMemory);
  }

  setMemory(isShown) {
    this.showsMemory = isShown;
    this.resize();
  }

  /** Light the actions that start at another time than in the first timeline. */
  toggleMoved() {
    const isShown = !this.showsMoved;
    this.clear();
    this.showsMoved = isShown;
    press("moved", isShown);
    if (isShown) {
      const [first, ...others] = this.panels;
      const found = others.map((panel) => findMoved(first, panel));
      others.forEach((panel, at) => {
        this.lit[at + 1] = lightRows(panel, found[at].rows);
      });
      say(others.map((panel, at) => movedText(panel, found[at])).join("; "));
    }
    this.paintMarks();
  }

  /** Hide the actions of a kind but for a shadow, or show them again. */
  toggleKind(kind) {
    const isHidden = !this.panels[0].hiddenKinds.has(kind);
    for (const { hiddenKinds } of this.panels) {
      if (isHidden) hiddenKinds.add(kind);
      else hiddenKinds.delete(kind);
    }
    document.querySelector(`#legend [data-kind="${kind}"]`)?.setAttribute("aria-pressed", String(!isHidden));
    this.draw();
  }

  setTheme(theme) {
    this.theme = theme;
    document.documentElement.dataset.theme = theme;
    press("theme", theme === "dark");
    this.colours = readColours();
    this.draw();
  }

  toggleTheme() {
    this.setTheme(this.theme === "dark" ? "light" : "dark");
  }
}

/** Draw the memory of timelines with the same unit to one scale. */
function shareMemoryScale(timelines) {
  const scale = ({ memoryUnit, localStageOf }) => {
    return memoryUnit === "bytes" ? memoryUnit : `${memoryUnit} of ${localStageOf.length} stages`;
  };
  const most = new Map();
  for (const timeline of timelines) {
    most.set(scale(timeline), Math.max(timeline.mostMemory, most.get(scale(timeline)) ?? 0));
  }
  for (const timeline of timelines) timeline.mostMemory = most.get(scale(timeline));
}

/** Return the same action in another timeline, or -1. */
function findTwin(timeline, row, other) {
  const [kind, stage, name] = [timeline.kind(row), timeline.stage(row), timeline.name[row]];
  const { names } = other;
  const peer = timeline.names.peer[name];
  const twin = names.kind.findIndex(
    (each, at) => each === kind && names.stage[at] === stage && names.peer[at] === peer,
  );
  const isKnown = twin !== NOTHING && timeline.microbatch[row] < other.microbatches;
  return isKnown ? other.findRow(twin, timeline.microbatch[row]) : NOTHING;
}

function lightRows(panel, rows) {
  const lit = new Uint8Array(panel.timeline.numRows);
  for (const row of rows) lit[row] = 1;
  return lit;
}
