// Pointers on a panel: hover, click, drag, wheel, and two fingers.

// A pointer that moves by less than this is a click.
const CLICK_PIXELS = 4;

/** Make a panel respond to dragging, zooming and hovering, by calling `app`. */
function connectPointers(panel, window, app) {
  const { element } = panel;
  const pointers = new Map();
  let moved = 0;
  // Where a range of time begins that is to fill the window.
  let rangeFrom = null;

  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    if (pointers.size === 0) moved = 0;
    const { time, isOnLanes } = panel.point(event);
    rangeFrom = pointers.size === 0 && (event.shiftKey || !isOnLanes) ? time : null;
    pointers.set(event.pointerId, event);
    element.setPointerCapture(event.pointerId);
  });

  element.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return app.hover(panel, event);
    const others = [...pointers.values()].filter((each) => each.pointerId !== event.pointerId);
    moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    pointers.set(event.pointerId, event);
    if (moved < CLICK_PIXELS) return;
    element.classList.add("dragged");
    app.leave();
    if (rangeFrom !== null) return app.showRange(rangeFrom, panel.point(event).time);
    if (others.length) pinch(panel, window, others[0], before, event);
    else drag(panel, window, before, event);
  });

  const release = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    if (pointers.size === 0) element.classList.remove("dragged");
    app.showRange(null);
    if (event.type === "pointerup" && moved < CLICK_PIXELS) app.click(panel, event);
    else if (event.type === "pointerup" && rangeFrom !== null) window.showBetween(rangeFrom, panel.point(event).time);
  };
  element.addEventListener("pointerup", release);
  element.addEventListener("pointercancel", release);
  element.addEventListener("pointerleave", () => app.leave());

  // The wheel scrolls the page, and lanes that do not fit; it zooms with Ctrl, as pinching does.
  const wheel = (event) => {
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const [across, down] = [event.deltaX * lines, event.deltaY * lines];
    const isAcross = event.shiftKey || Math.abs(across) > Math.abs(down);
    const isZoom = event.ctrlKey || event.metaKey;
    if (!isZoom && !isAcross) return;
    event.preventDefault();
    if (isZoom) window.wheel(down, panel.share(event.clientX));
    else window.pan((across || down) / panel.lanes.width);
  };
  element.addEventListener("wheel", wheel, { passive: false });
}

function drag(panel, window, before, event) {
  window.pan((before.clientX - event.clientX) / panel.lanes.width);
  window.jump();
  if (event.pointerType !== "touch") panel.element.scrollTop += before.clientY - event.clientY;
}

/** Zoom around the resting finger, by the change of its distance to the other one. */
function pinch(panel, window, resting, before, event) {
  const distance = (one) => Math.hypot(one.clientX - resting.clientX, one.clientY - resting.clientY);
  const factor = Math.max(distance(event), 10) / Math.max(distance(before), 10);
  window.zoom(factor, panel.share(resting.clientX));
  window.jump();
}
