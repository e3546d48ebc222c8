// Starts the page: reads the data, makes the panels, and connects keys and buttons.

const PAN_SHARE = 0.15;
const KEY_ZOOM = 1.5;

/** Return an element as whatever kind it is. @param {string} id @returns {any} */
function element(id) {
  return document.getElementById(id);
}

async function start() {
  const settings = JSON.parse(document.getElementById("data").textContent);
  const panels = [];
  for (const [at, data] of settings.timelines.entries()) {
    const columns = await readColumns(data.columns);
    await yieldToBrowser();
    const timeline = new Timeline(data, columns, settings.kinds);
    await yieldToBrowser();
    panels.push(new Panel(document.getElementById(`lanes-${at}`), timeline, settings));
  }
  await yieldToBrowser();
  const app = new App(panels, settings);
  connectButtons(app);
  connectKeys(app);
  applyState(app, location.hash.slice(1));
  await app.settle();
  return app;
}

function connectButtons(app) {
  const actions = {
    "zoom-in": () => app.zoom(KEY_ZOOM),
    "zoom-out": () => app.zoom(1 / KEY_ZOOM),
    reset: () => app.window.reset(),
    critical: () => app.toggleCritical(),
    memory: () => app.toggleMemory(),
    expand: () => app.expandAll(),
    moved: () => app.toggleMoved(),
    share: () => share(app),
    "save-png": async () => saveFile(await pngOf(app), "timelines.png"),
    "save-svg": () => saveFile(new Blob([svgOf(app)], { type: "image/svg+xml" }), "timelines.svg"),
    theme: () => app.toggleTheme(),
    keys: () => element("help").showModal(),
  };
  for (const [id, action] of Object.entries(actions)) {
    document.getElementById(id).addEventListener("click", action);
  }
  document.getElementById("moved").hidden = app.panels.length === 1;
  for (const button of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("#legend button"))) {
    button.addEventListener("click", () => app.toggleKind(Number(button.dataset.kind)));
  }
  document.querySelectorAll("#numbers table").forEach(makeSortable);
  document.getElementById("search").addEventListener("submit", (event) => {
    event.preventDefault();
    app.search(element("query").value);
  });
}

/** Letters work everywhere except in the search box; arrows act on the focused panel. */
function connectKeys(app) {
  const anywhere = {
    "+": () => app.zoom(KEY_ZOOM),
    "=": () => app.zoom(KEY_ZOOM),
    "-": () => app.zoom(1 / KEY_ZOOM),
    0: () => app.window.reset(),
    c: () => app.toggleCritical(),
    m: () => app.toggleMemory(),
    x: () => app.panels.length > 1 && app.toggleMoved(),
    h: () => app.selected && app.collapse(app.panels[app.selected.panel].timeline.rank[app.selected.row]),
    a: () => app.expandAll(),
    s: () => share(app),
    d: () => app.toggleTheme(),
    "?": () => element("help").showModal(),
    "/": () => document.getElementById("query").focus(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || element("help").open) return;
    if (event.key === "Escape") return app.clear();
    if (/** @type {Element} */ (event.target).matches("input")) return;
    const action = anywhere[event.key] ?? arrowAction(app, event);
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function arrowAction(app, event) {
  const at = app.panels.findIndex((panel) => panel.element === event.target);
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (at < 0 || !step) return undefined;
  const [across, down] = step;
  if (event.shiftKey) return () => app.walk(at, across, down);
  if (across) return () => app.window.pan(across * PAN_SHARE);
  return () => {
    app.panels[at].element.scrollTop += down * app.panels[at].lanes.step;
  };
}

openHook(start());
