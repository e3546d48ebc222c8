// Five chapters, each a schedule with a text and something to try.

class Chapters {
  /** @param {any[]} chapters @param {(chapter: any) => void} onOpen */
  constructor(chapters, onOpen) {
    this.chapters = chapters;
    this.onOpen = onOpen;
    this.at = NONE;
    this.show();
  }

  /** @param {number} at */
  open(at) {
    this.at = at;
    const focused = document.activeElement?.id ?? "";
    this.show();
    // The buttons are replaced: keep the focus where it was.
    if (focused.startsWith("chapter-")) (document.getElementById(focused) ?? byId("chapter-1")).focus();
    if (at !== NONE) this.onOpen(this.chapters[at]);
  }

  show() {
    const buttons = this.chapters.map((chapter, at) => {
      /** @type {Record<string, string>} */
      const state = at === this.at ? { "aria-current": "step" } : {};
      const button = make("button", { type: "button", id: `chapter-${at + 1}`, ...state }, `${at + 1}. ${chapter.title}`);
      button.addEventListener("click", () => this.open(at));
      return make("li", {}, button);
    });
    const lead = make("li", { class: "lead" }, "New here? Five short chapters:");
    byId("chapters").replaceChildren(make("ol", {}, lead, ...buttons));
    if (this.at !== NONE) byId("chapters").append(this.text(this.chapters[this.at]));
  }

  /** @param {any} chapter */
  text(chapter) {
    const isLast = this.at === this.chapters.length - 1;
    const next = make("button", { type: "button", id: "chapter-next" }, isLast ? "Close" : "Next chapter");
    next.addEventListener("click", () => this.open(isLast ? NONE : this.at + 1));
    return make(
      "div",
      { id: "chapter", "aria-live": "polite" },
      make("p", {}, chapter.text),
      make("div", { class: "row" }, make("p", { class: "task" }, `Try: ${chapter.task}`), next),
    );
  }
}
