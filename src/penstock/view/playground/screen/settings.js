// The settings of the page, and their form in its address.

/**
 * @typedef {{family: string, ranks: number, microbatches: number, stages: number, forward: number,
 *   input: number, weight: number, transfer: number, gain: number, activation: number, stash: number,
 *   limit: number}} Settings
 */

/** Every number: its key in the address, its label, range, unit, and what it means. */
const NUMBERS = [
  { name: "ranks", key: "p", label: "Ranks", unit: "" },
  { name: "microbatches", key: "m", label: "Microbatches", unit: "" },
  { name: "stages", key: "v", label: "Stages per rank", unit: "", hint: "where the family leaves the choice" },
  { name: "forward", key: "F", label: "F, forward", from: 0.1, to: 4, step: 0.1, unit: "s" },
  { name: "input", key: "I", label: "I, backward for inputs", from: 0.1, to: 4, step: 0.1, unit: "s" },
  { name: "weight", key: "W", label: "W, backward for weights", from: 0.1, to: 4, step: 0.1, unit: "s" },
  { name: "transfer", key: "t", label: "Transfer to another rank", from: 0, to: 1, step: 0.02, unit: "s" },
  { name: "gain", key: "g", label: "Overlap gain", from: 0, to: 1, step: 0.05, unit: "", hint: "what F and B together save, as a share of the shorter one" },
  { name: "activation", key: "a", label: "Activations", from: 0, to: 16, step: 0.25, unit: "GiB", hint: "of one microbatch, held from its F to its I or B" },
  { name: "stash", key: "s", label: "Kept from I to W", from: 0, to: 16, step: 0.25, unit: "GiB", hint: "of one microbatch, held until its W" },
  { name: "limit", key: "l", label: "Memory limit", from: 0, to: 128, step: 1, unit: "GiB", hint: "marks the families that need more; 0 means no limit" },
];

/** @type {Settings} */
const DEFAULTS = {
  family: "1F1B", ranks: 4, microbatches: 8, stages: 2, forward: 1, input: 1, weight: 1,
  transfer: 0, gain: 0, activation: 1, stash: 0.5, limit: 0,
};

/** Return the settings as the part of an address after #. @param {Settings} settings */
function formatSettings(settings) {
  const parts = [`f=${encodeURIComponent(settings.family)}`];
  for (const { name, key } of NUMBERS) {
    // @ts-ignore -- the names of NUMBERS are those of Settings
    if (settings[name] !== DEFAULTS[name] || ["p", "m"].includes(key)) parts.push(`${key}=${settings[name]}`);
  }
  return parts.join("&");
}

/**
 * Read settings from an address; whatever is not valid keeps its default.
 * @param {string} text @param {Record<string, number[]>} sizes @param {string[]} families
 */
function parseSettings(text, sizes, families) {
  const given = new URLSearchParams(text);
  /** @type {any} */
  const settings = { ...DEFAULTS };
  if (families.includes(given.get("f") ?? "")) settings.family = given.get("f");
  for (const { name, key, from = 0, to = 0 } of NUMBERS) {
    if (!given.has(key)) continue;
    const value = Number(given.get(key));
    const allowed = sizes[name];
    const isValid = allowed ? allowed.includes(value) : value >= from && value <= to;
    if (isValid) settings[name] = value;
  }
  return { settings: /** @type {Settings} */ (settings), packed: given.get("csv") };
}

/** Pack text into letters for an address. @param {string} text */
async function pack(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Unpack text from an address, which anybody may have written: not more than `most` bytes of it.
 * @param {string} packed @param {number} most */
async function unpack(packed, most) {
  const letters = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += decoder.decode(part.value, { stream: true });
    if (text.length > most) throw new Error("too long");
  }
  return text + decoder.decode();
}
