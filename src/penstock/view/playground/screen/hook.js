// What tests ask the page, as `window.penstock`.

/** @param {App} app */
function makeHook(app) {
  return {
    settle: () => app.remember(),
    settings: () => app.settings,
    state: () => ({ csv: formatCsv(app.schedule), selected: app.selected, now: app.player.now, numbers: app.numbers }),
    problems: () => app.problems.map((problem) => problem.text),
    /** The numbers of every family at these settings. @param {Partial<Settings>} changes */
    measure: (changes) =>
      app.families.map((family) => {
        const { numbers, refusal } = new Result(family, { ...app.settings, ...changes });
        return { name: family.name, refusal, numbers };
      }),
    /** Start and end of every row of a family. @param {string} name @param {Partial<Settings>} changes */
    times: (name, changes) => {
      const family = /** @type {Family} */ (app.families.find((each) => each.name === name));
      const { timeline } = new Result(family, { ...app.settings, ...changes });
      return timeline && { start: Array.from(timeline.start), end: Array.from(timeline.end), csv: formatCsv(timeline.schedule) };
    },
    /** What is wrong with a family's order after moves and removals, for each list of edits.
     * @param {string} name @param {Partial<Settings>} changes @param {any[][]} lists */
    findProblems: (name, changes, lists) => {
      const family = /** @type {Family} */ (app.families.find((each) => each.name === name));
      const base = /** @type {Schedule} */ (new Result(family, { ...app.settings, ...changes }).schedule);
      return lists.map((list) => {
        const edited = list.reduce((schedule, { from, to }) => (to ? moveWork(schedule, from, to) : removeWork(schedule, from)), base);
        return new Checker(edited, app.data.wording).find().map((problem) => problem.text);
      });
    },
    /** What the page says about CSV. @param {string} text */
    read: (text) => {
      try {
        const { schedule } = parseCsv(text, "given", app.data.wording);
        return new Checker(schedule, app.data.wording).find().map((problem) => problem.text);
      } catch (error) {
        return [/** @type {Error} */ (error).message];
      }
    },
    /** The box of a work on the screen. @param {number} rank @param {number} position */
    box: (rank, position) => {
      const painter = /** @type {Painter} */ (app.picture.painter);
      const { left, width } = painter.box(app.schedule.rowAt(rank, position));
      const canvas = app.picture.canvas.getBoundingClientRect();
      return { x: canvas.left + left + width / 2, y: canvas.top + painter.y(rank) + painter.frame.bar / 2, width };
    },
    svg: () => svgFile(app.timeline, heading(app), app.data.shades, app.colours),
    png: async () => (await pngFile(app.timeline, heading(app), app.data.shades, app.colours)).size,
  };
}
