// Moves the selected action by pointer or key, and shows at once what that breaks.

/** @typedef {{rank: number, position: number}} Place */

/** @param {App} app */
function connectDragging(app) {
  const { picture } = app;
  /** @type {{from: Place, base: Schedule, painter: Painter, to: Place, hasMoved: boolean, x: number, y: number} | null} */
  let drag = null;

  /** @param {PointerEvent} event @param {Place} place @param {Element} element */
  const begin = (event, place, element) => {
    const painter = /** @type {Painter} */ (picture.painter);
    drag = { from: place, base: app.schedule, painter, to: place, hasMoved: false, x: event.clientX, y: event.clientY };
    element.setPointerCapture(event.pointerId);
    event.preventDefault();
  };
  /** @param {PointerEvent} event */
  const move = (event) => {
    if (!drag) return;
    drag.hasMoved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 5;
    if (!drag.hasMoved) return;
    byId("handle").classList.add("dragged");
    const { rank, time } = picture.point(event);
    const to = { rank, position: placeAt(drag.painter, drag.from, rank, time) };
    if (to.rank === drag.to.rank && to.position === drag.to.position) return;
    drag.to = to;
    app.selected = to;
    app.preview(moveWork(drag.base, drag.from, to));
  };
  const end = () => {
    if (!drag) return;
    byId("handle").classList.remove("dragged");
    const { from, to, base } = drag;
    drag = null;
    if (from.rank !== to.rank || from.position !== to.position) app.change(moveWork(base, from, to), to);
  };
  const cancel = () => {
    if (!drag) return;
    byId("handle").classList.remove("dragged");
    app.selected = drag.from;
    drag = null;
    app.refreshFocus();
  };

  picture.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    const { rank, time, isInside } = picture.point(event);
    const place = isInside ? picture.workAt(rank, time) : null;
    app.select(place);
    picture.canvas.focus({ preventScroll: true });
    // A finger scrolls; it moves an action by its handle.
    if (place && event.pointerType !== "touch" && event.button === 0) begin(event, place, picture.canvas);
  });
  byId("handle").addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    if (app.selected) begin(event, app.selected, byId("handle"));
  });
  for (const element of [picture.canvas, byId("handle")]) {
    element.addEventListener("pointermove", move);
    element.addEventListener("pointerup", end);
    element.addEventListener("pointercancel", cancel);
    element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => moveByKey(app, event));
  }
}

/** Return the place in a rank's list at a time, without the work that moves.
 * @param {Painter} painter @param {Place} from @param {number} rank @param {number} time */
function placeAt(painter, from, rank, time) {
  const { schedule, timeline } = painter;
  let before = 0;
  schedule.orders[rank].forEach((_, position) => {
    if (rank === from.rank && position === from.position) return;
    const row = schedule.rowAt(rank, position);
    if (painter.startOf(row) + timeline.duration[row] / 2 < time) before++;
  });
  return before;
}

/** @param {App} app @param {KeyboardEvent} event */
function moveByKey(app, event) {
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
  const down = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
  if (event.key === "Delete" || event.key === "Backspace") app.remove();
  else if (across && event.altKey) app.shift(across);
  else if (down && event.altKey) app.shiftRank(down);
  else if (across || down) app.walk(across, down);
  else return;
  event.preventDefault();
}
