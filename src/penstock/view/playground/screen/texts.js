// The texts around the picture: numbers, findings, and what can be done with the selection.

/** @param {App} app */
function showFigures(app) {
  const { settings, numbers, timeline } = app;
  const { schedule } = timeline;
  const isOwn = app.isCustom || app.edits.isEdited || schedule !== app.edits.original;
  byId("focus-name").textContent = schedule.name + (isOwn && !app.isCustom ? ", edited" : "");
  const result = app.results.find(({ family }) => family.name === settings.family);
  const summary = app.isCustom ? "" : result?.family.data.summary ?? "";
  const { numRanks, microbatches } = schedule;
  const still = `${app.refusal}. The picture is still that of ${countText(numRanks, "rank")} and ${countText(microbatches, "microbatch")}.`;
  byId("focus-summary").textContent = app.refusal ? still : summary;
  byId("focus-summary").classList.toggle("wrong", app.refusal !== "");
  /** @type {[string, string, string, boolean][]} */
  const figures = [];
  if (numbers) {
    const isForward = schedule.isForwardOnly;
    const held = isForward ? "nothing kept" : countText(numbers.peakMicrobatches, "microbatch");
    const isOver = isOverLimit(numbers, schedule, settings);
    figures.push(["Step time", `${formatNumber(numbers.endTime)} s`, difference(app, "endTime", " s"), false]);
    figures.push(["Bubble", `${(100 * numbers.bubble).toFixed(1)} %`, "", false]);
    figures.push(["Memory", held, "", false]);
    if (!isForward) figures.push(["Peak per rank", `${formatNumber(numbers.peakBytes)} GiB`, isOver ? `more than ${settings.limit} GiB` : "activations", isOver]);
    if (result?.numbers && !isOwn) figures.push(["Formula", "", formulaText(result, settings), false]);
  } else {
    figures.push(["Step time", timeline.isFinished ? "not valid" : "never ends", "", true]);
  }
  byId("figures").replaceChildren(
    ...figures.map(([label, text, more, isOver]) =>
      make("div", isOver ? { class: "over" } : {}, make("dt", {}, label), make("dd", {}, text, ...(more ? [make("small", {}, more)] : []))),
    ),
  );
}

/** Return how a number differs from that of the original order. @param {App} app @param {string} name @param {string} unit */
function difference(app, name, unit) {
  const before = /** @type {any} */ (new Timeline(app.edits.original, app.settings));
  if (app.timeline.schedule === app.edits.original || !before.isFinished) return "";
  const more = app.numbers[name] - before.measure()[name];
  if (Math.abs(more) < 1e-9) return "as before";
  return `${more > 0 ? "+" : "−"}${formatNumber(Math.abs(more))}${unit}`;
}

/** Scroll to what was just chosen further down, unless it can be seen. */
function showFocus() {
  const { top, bottom } = byId("focus-name").getBoundingClientRect();
  if (top < 0 || bottom > innerHeight) byId("focus").scrollIntoView();
}

/** @param {App} app */
function showFindings({ problems }) {
  const box = byId("findings");
  box.className = problems.length ? "wrong" : "";
  if (!problems.length) {
    box.replaceChildren(make("strong", {}, "No problem found: "), "complete, in order, and free of deadlock");
    return;
  }
  const count = problems.length >= MOST_PROBLEMS ? `${MOST_PROBLEMS} or more` : String(problems.length);
  const shown = problems.slice(0, 4).map((problem) => make("pre", {}, problem.text));
  const rest = problems.length > 4 ? [`and ${problems.length - 4} more`] : [];
  box.replaceChildren(make("strong", {}, `${count} problem${problems.length > 1 ? "s" : ""} found`), ...shown, ...rest);
}

/** @param {App} app */
function showEdits(app) {
  const { selected, schedule, edits } = app;
  byId("chosen").textContent = selected ? `Selected: ${describeWork(schedule, schedule.rowAt(selected.rank, selected.position))}` : "Drag an action, or select one";
  const length = selected ? schedule.orders[selected.rank].length : 0;
  byId("earlier").disabled = !selected || selected.position === 0;
  byId("later").disabled = !selected || selected.position + 1 >= length;
  byId("remove").disabled = !selected;
  byId("undo").disabled = !edits.isEdited;
  byId("original").disabled = !edits.isEdited && !app.isCustom;
  byId("redo").disabled = edits.at + 1 >= edits.history.length;
}

/** @param {any} data */
function showLegend({ labels, shades }) {
  const items = labels.map((/** @type {string} */ label, /** @type {number} */ kind) => {
    const box = make("span", { class: "key" });
    box.style.background = `linear-gradient(90deg, ${shades[1][kind][0][0]} 50%, ${shades[1][kind][1][0]} 50%)`;
    return make("li", {}, box, `${LETTERS[kind]} ${label.toLowerCase()}`);
  });
  const idle = make("span", { class: "key idle" });
  const pair = make("span", { class: "key" });
  pair.style.background = `linear-gradient(${shades[1][FORWARD][0][0]} 50%, ${shades[1][BACKWARD][0][0]} 50%)`;
  byId("legend").replaceChildren(...items, make("li", {}, pair, "F and B together"), make("li", {}, idle, "idle"), make("li", {}, "lighter: later stages of a rank"), make("li", {}, "numbers: microbatches"), make("li", {}, "line below a rank: activations it holds"));
}
