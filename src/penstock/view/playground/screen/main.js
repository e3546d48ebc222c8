// Starts the page: data, buttons and keys.

/** The line above an exported picture. @param {App} app */
function heading({ timeline, numbers, settings }) {
  const { schedule } = timeline;
  const sizes = `${schedule.name}, ${schedule.numRanks} ranks, ${schedule.microbatches} microbatches`;
  if (!numbers) return `${sizes}: not valid`;
  const costs = `F ${settings.forward} s, I ${settings.input} s, W ${settings.weight} s, transfer ${settings.transfer} s`;
  return `${sizes}: step ${formatNumber(numbers.endTime)} s, bubble ${(100 * numbers.bubble).toFixed(1)} % (${costs})`;
}

/** @param {App} app */
function connectButtons(app) {
  const { player, picture } = app;
  const fileName = () => `${app.timeline.schedule.name.replace(/\W+/g, "-").toLowerCase()}-${app.schedule.numRanks}x${app.schedule.microbatches}`;
  /** @type {Record<string, () => void>} */
  const actions = {
    first: () => player.go(0),
    back: () => player.step(-1),
    play: () => player.toggle(),
    next: () => player.step(1),
    last: () => player.go(Infinity),
    "zoom-in": () => (picture.zoomBy(1.5), app.drawFocus()),
    "zoom-out": () => (picture.zoomBy(1 / 1.5), app.drawFocus()),
    fit: () => (picture.zoomBy(0), app.drawFocus()),
    earlier: () => app.shift(-1),
    later: () => app.shift(1),
    remove: () => app.remove(),
    undo: () => app.travel("undo"),
    redo: () => app.travel("redo"),
    original: () => ((app.isCustom = false), app.update(true)),
    apply: () => app.useCsv(byId("csv").value),
    share: () => app.share(),
    theme: () => {
      app.setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      app.update(false);
    },
    keys: () => byId("help").showModal(),
    defaults: () => app.set({ ...DEFAULTS, family: app.settings.family, ranks: app.settings.ranks, microbatches: app.settings.microbatches, stages: app.settings.stages }),
    "save-svg": () => download(new Blob([svgFile(app.timeline, heading(app), app.data.shades, app.colours)], { type: "image/svg+xml" }), `${fileName()}.svg`),
    "save-png": async () => download(await pngFile(app.timeline, heading(app), app.data.shades, app.colours), `${fileName()}.png`),
    "save-csv": () => download(new Blob([formatCsv(app.schedule)], { type: "text/csv" }), `${fileName()}.csv`),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  byId("time").addEventListener("input", () => player.go((byId("time").value / 1000) * player.seconds));
  byId("sort").addEventListener("change", () => app.showCards());
}

/** @param {App} app */
function connectKeys(app) {
  const { player, picture } = app;
  /** @type {Record<string, () => void>} */
  const keys = {
    " ": () => player.toggle(),
    ",": () => player.step(-1),
    ".": () => player.step(1),
    Home: () => player.go(0),
    End: () => player.go(Infinity),
    "+": () => (picture.zoomBy(1.5), app.drawFocus()),
    "=": () => (picture.zoomBy(1.5), app.drawFocus()),
    "-": () => (picture.zoomBy(1 / 1.5), app.drawFocus()),
    0: () => (picture.zoomBy(0), app.drawFocus()),
    Escape: () => app.select(null),
    "?": () => byId("help").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const element = /** @type {HTMLElement} */ (event.target);
    if (element.closest("input, textarea, select, dialog")) return;
    const letter = event.key.toLowerCase();
    if (event.ctrlKey || event.metaKey) {
      if (letter !== "z" && letter !== "y") return;
      app.travel(letter === "y" || event.shiftKey ? "redo" : "undo");
    } else if (event.altKey || !(event.key in keys)) return;
    else if (event.key === " " && element.closest("button, summary, a")) return;
    else keys[event.key]();
    event.preventDefault();
  });
}

async function start() {
  const data = JSON.parse(byId("data").textContent);
  const families = data.families.map((/** @type {FamilyData} */ each) => new Family(each, data.sizes));
  await Promise.all(families.map((/** @type {Family} */ family) => family.load()));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  const app = new App(data, families);
  app.setTheme(dark.matches ? "dark" : "light");
  if (innerWidth <= 640) byId("settings").open = false;
  showLegend(data);
  connectButtons(app);
  connectKeys(app);
  connectDragging(app);
  await app.recall(location.hash.slice(1));
  const { scroller } = app.picture;
  scroller.addEventListener("scroll", () => app.drawFocus());
  scroller.addEventListener("wheel", (/** @type {WheelEvent} */ event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const { left, width } = scroller.getBoundingClientRect();
    app.picture.zoomBy(Math.exp(-event.deltaY * 0.0016), (event.clientX - left) / width);
    app.drawFocus();
  }, { passive: false });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    app.showCards();
    app.drawFocus();
  });
  // By now the page may have written its own address over the one that was opened.
  addEventListener("hashchange", ({ newURL }) => app.recall(new URL(newURL).hash.slice(1)));
  dark.addEventListener("change", () => (app.setTheme(dark.matches ? "dark" : "light"), app.update(false)));
  return app;
}

const started = start();
// @ts-ignore -- the tests' hook
window.penstock = { ready: started.then((app) => Object.assign(window.penstock, makeHook(app))).then(() => undefined) };
