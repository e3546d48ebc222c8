// What is shown, as the part of the address after #: window, toggles, hidden kinds, selection.

/** Return the state of the page as text. */
function formatState(app) {
  const state = new URLSearchParams();
  const { goalLeft, goalRight, whole } = app.window;
  if (goalLeft > 0 || goalRight < whole) state.set("time", `${goalLeft}~${goalRight}`);
  if (app.showsCritical) state.set("critical", "1");
  if (app.showsMoved) state.set("moved", "1");
  state.set("memory", app.showsMemory ? "1" : "0");
  const hidden = [...app.panels[0].hiddenKinds].map((kind) => app.settings.kinds[kind].text);
  if (hidden.length) state.set("hide", hidden.join("."));
  const ranks = [...app.panels[0].hiddenRanks];
  if (ranks.length) state.set("collapse", ranks.join("."));
  if (app.selected) state.set("select", `${app.selected.panel}~${app.selected.row}`);
  return state.toString();
}

/** Show what an address says; whatever is not valid is left out. */
function applyState(app, text) {
  const state = new URLSearchParams(text);
  const pair = (name) => (state.get(name) ?? "").split("~").map(Number);
  const [left, right] = pair("time");
  if (right > left) app.window.showBetween(left, right);
  if (state.has("memory")) app.setMemory(state.get("memory") === "1");
  if (state.has("critical") !== app.showsCritical) app.toggleCritical();
  if (state.has("moved") && app.panels.length > 1) app.toggleMoved();
  for (const name of (state.get("hide") ?? "").split(".").filter(Boolean)) {
    const kind = app.settings.kinds.findIndex((each) => each.text === name);
    if (kind >= 0) app.toggleKind(kind);
  }
  for (const rank of (state.get("collapse") ?? "").split(".").filter(Boolean)) app.collapse(Number(rank));
  const [panel, row] = pair("select");
  if (state.has("select") && row < app.panels[panel]?.timeline.numRows) app.select(panel, row);
}

/** Put the state into the address, and copy that where the browser allows it. */
async function share(app) {
  history.replaceState(null, "", `#${formatState(app)}`);
  try {
    await navigator.clipboard.writeText(location.href);
    say("The address of what you see is copied");
  } catch {
    say("The address bar has the address of what you see; copy it from there");
  }
}
