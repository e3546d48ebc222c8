// Every family side by side: its numbers, its formula, and its picture on one time scale.

/** What a family is at these settings: numbers and a timeline, or why it is refused. */
class Result {
  /** @param {Family} family @param {Settings} settings */
  constructor(family, settings) {
    this.family = family;
    this.stages = family.stagesPerRank(settings.stages);
    const schedule = family.schedule(this.stages, settings.ranks, settings.microbatches);
    this.refusal = typeof schedule === "string" ? schedule : "";
    this.schedule = typeof schedule === "string" ? null : schedule;
    this.timeline = this.schedule && new Timeline(this.schedule, settings);
    this.numbers = this.timeline && this.timeline.measure();
  }
}

/** Return the value of a family's formula for idle time, or null where it does not apply.
 * @param {Result} result @param {Settings} settings */
function bubbleFormula({ family, stages }, settings) {
  const { forward, input, weight, gain, ranks } = settings;
  const isEqual = forward === input && input === weight;
  if (family.data.bubble.for_equal_costs && !isEqual) return null;
  const pair = forward + input + weight - gain * Math.min(forward, input + weight);
  const factors = family.layer(stages, ranks).bubble;
  const value = sum([forward, input, weight, pair].map((seconds, at) => seconds * factors[at]));
  return value < -1e-9 ? null : Math.max(0, value);
}

/** @param {Result} result @param {Settings} settings */
function memoryFormula({ family, stages }, settings) {
  const [constant, perMicrobatch] = family.layer(stages, settings.ranks).memory;
  return constant + perMicrobatch * settings.microbatches;
}

/** Return formula, value and simulated value in words. @param {Result} result @param {Settings} settings */
function formulaText(result, settings) {
  const { bubble, memory } = result.family.data;
  const value = bubbleFormula(result, settings);
  const { papersIdle, peakMicrobatches } = /** @type {any} */ (result.numbers);
  const isForward = /** @type {Schedule} */ (result.schedule).isForwardOnly;
  let text = `idle ${bubble.text}`;
  const isPlain = bubble.is_exact && !bubble.text.includes("=");
  if (value !== null && bubble.text !== "0") text += `${isPlain ? " =" : ":"} ${formatNumber(value)} s`;
  const differs = value === null || Math.abs(value - papersIdle) > 1e-9;
  if (differs && !isForward) text += `, simulated ${formatNumber(papersIdle)} s`;
  if (isForward) return text;
  const held = memoryFormula(result, settings);
  text += `; memory ${memory.text}${memory.text === String(held) ? "" : ` = ${formatNumber(held)}`}`;
  return Math.abs(held - peakMicrobatches) > 1e-9 ? `${text}, simulated ${formatNumber(peakMicrobatches)}` : text;
}

/** Whether two sums of the same costs are equal but for their rounding. @param {number} one @param {number} other */
function isLevel(one, other) {
  return Math.abs(one - other) <= 1e-9 * Math.max(1, Math.abs(other));
}

/** @param {any} numbers @param {Schedule} schedule @param {Settings} settings */
function isOverLimit(numbers, schedule, { limit }) {
  return limit > 0 && !schedule.isForwardOnly && numbers.peakBytes > limit * (1 + 1e-9);
}

class Cards {
  /** @param {any} shades @param {(family: string) => void} onChoose */
  constructor(shades, onChoose) {
    this.shades = shades;
    this.onChoose = onChoose;
    /** @type {Map<string, any>} */
    this.canvases = new Map();
  }

  /** @param {Result[]} results @param {Settings} settings @param {string} order
   * @param {Record<string, string>} colours @param {string} current */
  show(results, settings, order, colours, current) {
    // Evaluation would be the fastest of all, and is not a way to train.
    const by = (/** @type {Result} */ { numbers, schedule }) => (schedule && !schedule.isForwardOnly ? /** @type {any} */ (numbers)[order] : Number.MAX_VALUE);
    const sorted = order === "listed" ? results : [...results].sort((one, other) => by(one) - by(other));
    const trained = results.filter(({ schedule }) => schedule && !schedule.isForwardOnly);
    const least = (/** @type {string} */ name) => Math.min(...trained.map(({ numbers }) => /** @type {any} */ (numbers)[name]));
    const best = { endTime: least("endTime"), bubble: least("bubble"), peakMicrobatches: least("peakMicrobatches") };
    const focused = document.activeElement?.id ?? "";
    byId("cards").replaceChildren(...sorted.map((result) => this.card(result, settings, best, current)));
    if (focused.startsWith("card-")) document.getElementById(focused)?.focus();
    const seconds = Math.max(...results.map(({ numbers }) => numbers?.endTime ?? 0));
    for (const result of sorted) if (result.timeline) this.draw(result, seconds, colours);
  }

  /** @param {Result} result @param {Settings} settings @param {Record<string, number>} best @param {string} current */
  card(result, settings, best, current) {
    const { family, numbers, schedule } = result;
    const isCurrent = family.name === current;
    const stages = `${result.stages} stage${result.stages > 1 ? "s" : ""} per rank`;
    const name = make("button", { type: "button", id: `card-${family.name}`, "aria-current": String(isCurrent), title: family.data.summary }, family.name);
    const head = make("header", {}, make("span", {}, name, make("span", { class: "note label" }, ` ${stages}`)));
    const card = make("li", { class: isCurrent ? "card current" : "card" }, head);
    card.addEventListener("click", () => this.onChoose(family.name));
    if (!numbers || !schedule) {
      card.append(make("p", { class: "refused" }, result.refusal));
      return card;
    }
    const isForward = schedule.isForwardOnly;
    const gib = isForward ? "" : `, ${formatNumber(numbers.peakBytes)} GiB`;
    const memory = isForward ? "nothing kept" : `${countText(numbers.peakMicrobatches, "microbatch")}${gib}`;
    const isOver = isOverLimit(numbers, schedule, settings);
    const cells = [
      ["step", `${formatNumber(numbers.endTime)} s`, isLevel(numbers.endTime, best.endTime)],
      ["bubble", `${(100 * numbers.bubble).toFixed(1)} %`, isLevel(numbers.bubble, best.bubble)],
      ["memory", memory + (isOver ? ": too much" : ""), isLevel(numbers.peakMicrobatches, best.peakMicrobatches)],
    ];
    for (const [label, text, isBest] of cells) {
      const mark = label === "memory" && isOver ? "over" : isBest && !isForward ? "best" : "";
      head.append(make("span", {}, make("span", { class: "label" }, `${label} `), make("span", { class: mark }, String(text))));
    }
    head.append(make("span", { class: "formula label" }, formulaText(result, settings)));
    const canvas = make("canvas", { role: "img", "aria-label": `${family.name}: step ${cells[0][1]}, bubble ${cells[1][1]}` });
    this.canvases.set(family.name, canvas);
    card.append(canvas);
    return card;
  }

  /** @param {Result} result @param {number} seconds @param {Record<string, string>} colours */
  draw({ family, timeline }, seconds, colours) {
    if (!timeline) return;
    const canvas = this.canvases.get(family.name);
    const width = canvas.parentElement.clientWidth - 26;
    const ranks = timeline.schedule.numRanks;
    const lane = ranks > 4 ? 9 : 12;
    const frame = { left: 0, top: 0, scale: width / seconds, scrolled: 0, width, lane, bar: lane - 2, curve: 0 };
    const surface = new CanvasSurface(canvas, width, ranks * lane, devicePixelRatio);
    new Painter(timeline, frame, this.shades, colours).draw(surface, Infinity);
  }
}
