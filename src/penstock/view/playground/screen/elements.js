// Elements of the page: find them, make them, speak through the status line.

/** @param {string} id @returns {any} */
function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element ${id}`);
  return element;
}

/**
 * Make an element with text or children.
 * @param {string} tag @param {Record<string, string>} [attributes] @param {(Node | string)[]} children
 * @returns {any}
 */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Show a message where screen readers announce it. @param {string} text */
function say(text) {
  byId("status").textContent = text;
}

/** Return a number with its noun, in the plural where it must be. @param {number} count @param {string} noun */
function countText(count, noun) {
  const plural = noun.endsWith("h") ? `${noun}es` : `${noun}s`;
  return `${formatNumber(count)} ${count === 1 ? noun : plural}`;
}

/** Return the colours of the page's style, for canvases. */
function readColours() {
  const style = getComputedStyle(document.body);
  const names = ["card", "ink", "muted", "line", "idle", "memory", "wrong", "accent"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
