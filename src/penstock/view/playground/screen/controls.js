// The sliders: one per setting, with its value beside its name.

class Controls {
  /** @param {Record<string, number[]>} sizes @param {(name: string, value: number) => void} onChange */
  constructor(sizes, onChange) {
    this.sizes = sizes;
    /** @type {Map<string, {input: any, output: any, unit: string}>} */
    this.sliders = new Map();
    for (const each of NUMBERS) byId("sliders").append(this.slider(each, onChange));
  }

  /** @param {any} setting @param {(name: string, value: number) => void} onChange */
  slider({ name, label, from, to, step, unit, hint = "" }, onChange) {
    const choices = this.sizes[name];
    const range = choices
      ? { min: "0", max: String(choices.length - 1), step: "1" }
      : { min: String(from), max: String(to), step: String(step) };
    const input = make("input", { type: "range", id: `set-${name}`, ...range });
    const output = make("output", { for: `set-${name}` });
    input.addEventListener("input", () => onChange(name, choices ? choices[input.value] : Number(input.value)));
    this.sliders.set(name, { input, output, unit });
    const note = hint ? [make("small", { id: `hint-${name}` }, hint)] : [];
    if (hint) input.setAttribute("aria-describedby", `hint-${name}`);
    return make("div", { class: "slider" }, make("label", { for: `set-${name}` }, label), output, ...note, input);
  }

  /** @param {any} settings */
  show(settings) {
    for (const [name, { input, output, unit }] of this.sliders) {
      const value = settings[name];
      const choices = this.sizes[name];
      input.value = String(choices ? choices.indexOf(value) : value);
      const text = name === "limit" && value === 0 ? "none" : `${formatNumber(value)}${unit && ` ${unit}`}`;
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
    }
  }
}
