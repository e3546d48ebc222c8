// The state of the page: settings, the order in focus, the selection, and when what is drawn.

class App {
  /** @param {any} data @param {Family[]} families */
  constructor(data, families) {
    this.data = data;
    this.families = families;
    this.sizes = { ranks: data.sizes.ranks, microbatches: data.sizes.microbatches, stages: data.sizes.stages_per_rank };
    /** @type {Settings} */
    this.settings = { ...DEFAULTS };
    this.isCustom = false;
    // Why there is no order of this family at this size; the one before stays in focus.
    this.refusal = "";
    /** @type {Place | null} */
    this.selected = null;
    /** @type {Problem[]} */
    this.problems = [];
    this.picture = new Picture(data.shades);
    this.player = new Player(() => this.drawFocus());
    this.cards = new Cards(data.shades, (family) => (this.set({ family }), showFocus()));
    this.controls = new Controls(this.sizes, (name, value) => this.set({ [name]: value }));
    this.chapters = new Chapters(data.chapters, (chapter) => this.openChapter(chapter));
    /** @type {Result[]} */
    this.results = [];
    /** @type {any} */
    this.numbers = null;
    this.edits = new Edits(/** @type {Schedule} */ (this.families[0].schedule(1, 1, 1)));
    this.timeline = new Timeline(this.edits.current, this.settings);
    this.colours = readColours();
    this.turn = 0;
  }

  get schedule() {
    return this.edits.current;
  }

  /** Change settings; another family or size starts from its own order again. @param {Partial<Settings>} changes */
  set(changes) {
    Object.assign(this.settings, changes);
    const isOther = ["family", "ranks", "microbatches", "stages"].some((name) => name in changes);
    if (isOther) this.isCustom = false;
    this.update(isOther);
  }

  /** @param {any} chapter */
  openChapter({ family, ranks, microbatches }) {
    this.player.now = Infinity;
    this.picture.zoom = 1;
    this.set({ ...DEFAULTS, family, ranks, microbatches });
  }

  /** Compute everything again. @param {boolean} startsAgain whether the order in focus is replaced */
  update(startsAgain) {
    this.results = this.families.map((family) => new Result(family, this.settings));
    if (startsAgain) {
      const chosen = this.results.find(({ family }) => family.name === this.settings.family);
      this.refusal = chosen?.refusal ?? "";
      if (chosen?.schedule) this.open(chosen.schedule);
    }
    this.controls.show(this.settings);
    this.showCards();
    this.refreshFocus();
  }

  /** @param {Schedule} schedule */
  open(schedule) {
    this.edits = new Edits(schedule);
    this.selected = null;
    say("");
  }

  showCards() {
    const current = this.isCustom ? "" : this.settings.family;
    this.cards.show(this.results, this.settings, byId("sort").value, this.colours, current);
  }

  refreshFocus() {
    this.preview(this.schedule);
    showEdits(this);
    byId("csv").value = formatCsv(this.schedule);
    this.remember();
  }

  /** Show a schedule in the picture with its numbers and findings. @param {Schedule} schedule */
  preview(schedule) {
    this.timeline = new Timeline(schedule, this.settings);
    this.problems = new Checker(schedule, this.data.wording).find();
    this.numbers = this.problems.length ? null : this.timeline.measure();
    this.player.load(this.timeline);
    showFigures(this);
    showFindings(this);
    this.drawFocus();
  }

  drawFocus() {
    this.picture.draw(this.timeline, this.player.now, this.colours);
    this.picture.showHandle(this.selected);
    this.player.show(this.data.shades, this.numbers);
  }

  /** @param {Place | null} place */
  select(place) {
    this.selected = place;
    this.picture.showHandle(place);
    showEdits(this);
  }

  /** @param {Schedule} schedule @param {Place | null} place */
  change(schedule, place) {
    this.edits.apply(schedule);
    this.selected = place;
    this.refreshFocus();
  }

  /** Move the selected work along its rank. @param {number} across */
  shift(across) {
    if (!this.selected) return;
    const { rank, position } = this.selected;
    const to = { rank, position: position + across };
    if (to.position >= 0 && to.position < this.schedule.orders[rank].length) this.change(moveWork(this.schedule, this.selected, to), to);
  }

  /** Move the selected work to another rank, at its time. @param {number} down */
  shiftRank(down) {
    if (!this.selected) return;
    const rank = this.selected.rank + down;
    if (rank < 0 || rank >= this.schedule.numRanks) return;
    const painter = /** @type {Painter} */ (this.picture.painter);
    const time = painter.startOf(this.schedule.rowAt(this.selected.rank, this.selected.position));
    const to = { rank, position: placeAt(painter, this.selected, rank, time) };
    this.change(moveWork(this.schedule, this.selected, to), to);
  }

  remove() {
    if (!this.selected) return;
    const { rank, position } = this.selected;
    const changed = removeWork(this.schedule, this.selected);
    const left = changed.orders[rank].length;
    this.change(changed, left ? { rank, position: Math.min(position, left - 1) } : null);
  }

  /** Select the neighbour of the selected work. @param {number} across @param {number} down */
  walk(across, down) {
    const { schedule, selected } = this;
    if (!selected) return this.select({ rank: 0, position: 0 });
    const rank = Math.min(Math.max(selected.rank + down, 0), schedule.numRanks - 1);
    let position = selected.position + across;
    if (down) {
      const painter = /** @type {Painter} */ (this.picture.painter);
      const time = painter.startOf(schedule.rowAt(selected.rank, selected.position));
      position = schedule.orders[rank].findIndex((_, at) => painter.startOf(schedule.rowAt(rank, at)) >= time);
      if (position < 0) position = schedule.orders[rank].length - 1;
    }
    return this.select({ rank, position: Math.min(Math.max(position, 0), schedule.orders[rank].length - 1) });
  }

  /** @param {"undo" | "redo"} way */
  travel(way) {
    this.edits[way]();
    this.selected = null;
    this.refreshFocus();
  }

  /** Use an order given as CSV; say what is wrong with it. @param {string} text */
  useCsv(text) {
    try {
      const { schedule, left } = parseCsv(text, "Your order", this.data.wording);
      this.isCustom = true;
      this.refusal = "";
      this.open(schedule);
      this.showCards();
      this.refreshFocus();
      showFocus();
      byId("csv-error").textContent = left
        ? `${left} sends, receives and other additions were left out; the page prices transfers itself`
        : "";
    } catch (error) {
      byId("csv-error").textContent = /** @type {Error} */ (error).message;
    }
  }

  /** Keep the state in the address, so that it can be shared. */
  async remember() {
    const turn = ++this.turn;
    const parts = [formatSettings(this.settings)];
    if (this.isCustom || this.edits.isEdited) parts.push(`csv=${await pack(formatCsv(this.schedule))}`);
    // Packing takes its time: an undone order must not come after what undid it.
    if (turn !== this.turn) return;
    clearTimeout(this.later);
    this.later = setTimeout(() => history.replaceState(null, "", `#${parts.join("&")}`), 120);
    this.address = parts.join("&");
  }

  async share() {
    await this.remember();
    const address = `${location.href.split("#")[0]}#${this.address}`;
    history.replaceState(null, "", `#${this.address}`);
    try {
      await navigator.clipboard.writeText(address);
      say("The address of what you see is copied");
    } catch {
      say("The address bar has the address of what you see; copy it from there");
    }
  }

  /** Show what an address says. @param {string} text */
  async recall(text) {
    const names = this.families.map(({ name }) => name);
    const { settings, packed } = parseSettings(text, this.sizes, names);
    this.settings = settings;
    this.isCustom = false;
    this.update(true);
    if (!packed) return;
    const order = await unpack(packed, MOST_LETTERS).catch(() => "");
    if (order) this.useCsv(order);
    if (!order || byId("csv-error").textContent) say("The order in this address cannot be read; this is the family's own");
  }

  /** @param {string} theme */
  setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
    this.colours = readColours();
  }
}
