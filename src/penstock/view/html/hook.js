// `window.penstock`: what tests and scripts can ask the page.

/** Publish what the page draws, as numbers. */
function openHook(ready) {
  let app;
  globalThis.penstock = {
    ready: ready.then((started) => {
      app = started;
    }),
    /** Resolve when everything is drawn and nothing moves. */
    settle: () => app.settle(),
    /** Return the bars of a timeline as columns: times in seconds, heights in lanes. */
    rectangles(at = 0) {
      const { timeline, bars } = app.panels[at];
      const column = (value) => Array.from(bars.rows, value);
      return {
        row: column((row) => row),
        rank: column((row) => timeline.rank[row]),
        kind: column((row) => timeline.kind(row)),
        stage: column((row) => timeline.stage(row)),
        microbatch: column((row) => timeline.microbatch[row]),
        left: column((row) => timeline.begin + timeline.start[row]),
        right: column((row) => timeline.begin + timeline.end[row]),
        top: column((row) => bars.top(row)),
        bottom: column((row) => bars.bottom(row)),
      };
    },
    /** Return the box of a row on the screen, in pixels. */
    box(at, row) {
      const { left, top } = app.panels[at].element.getBoundingClientRect();
      const box = app.panels[at].box(row);
      return { x: left + box.x, y: top + box.y, width: box.width, height: box.height };
    },
    /** Return the dependencies of a row, the one it waited for (or -1), and its users. */
    links(at, row) {
      const { timeline } = app.panels[at];
      const [needs, users] = [timeline.needs(row), timeline.users(row)];
      return { needs, waitedFor: timeline.waitedFor(row), users };
    },
    /** Return when the memory of a rank changes, and its new level. */
    memory(at, rank) {
      const levels = [];
      app.panels[at].eachLevel(rank, (time, held) => levels.push([time, held]));
      return levels;
    },
    critical: (at) => Array.from(app.panels[at].timeline.critical),
    /** Return the marked rows of a panel, and whether the critical path is shown. */
    marks(at) {
      const { lit, selected, hovered, showsCritical } = app.marks(at);
      const rows = lit ? [...lit.keys()].filter((row) => lit[row]) : [];
      return { lit: rows, selected, hovered, showsCritical };
    },
    /** Return the times at the left and right edge. */
    window: () => [app.window.left, app.window.right],
  };
}
