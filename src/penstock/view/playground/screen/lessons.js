// Five lessons, each a schedule with a text and something to try.

class Lessons {
  /** @param {any[]} lessons @param {(lesson: any) => void} onOpen */
  constructor(lessons, onOpen) {
    this.lessons = lessons;
    this.onOpen = onOpen;
    this.at = NONE;
    this.show();
  }

  /** @param {number} at */
  open(at) {
    this.at = at;
    this.show();
    if (at !== NONE) this.onOpen(this.lessons[at]);
  }

  show() {
    const buttons = this.lessons.map((lesson, at) => {
      /** @type {Record<string, string>} */
      const state = at === this.at ? { "aria-current": "step" } : {};
      const button = make("button", { type: "button", ...state }, `${at + 1}. ${lesson.title}`);
      button.addEventListener("click", () => this.open(at));
      return make("li", {}, button);
    });
    const lead = make("li", { class: "lead" }, "New here? Five short lessons:");
    byId("lessons").replaceChildren(make("ol", {}, lead, ...buttons));
    if (this.at !== NONE) byId("lessons").append(this.text(this.lessons[this.at]));
  }

  /** @param {any} lesson */
  text(lesson) {
    const isLast = this.at === this.lessons.length - 1;
    const next = make("button", { type: "button", id: "lesson-next" }, isLast ? "Close" : "Next lesson");
    next.addEventListener("click", () => this.open(isLast ? NONE : this.at + 1));
    return make(
      "div",
      { id: "lesson", "aria-live": "polite" },
      make("p", {}, lesson.text),
      make("div", { class: "row" }, make("p", { class: "task" }, `Try: ${lesson.task}`), next),
    );
  }
}
