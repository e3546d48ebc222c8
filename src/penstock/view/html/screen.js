// The page outside the pictures: buttons, the status line, the tooltip.

/** Return the colours of the page's style, for the canvases. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "ink", "muted", "line", "idle", "memory", "veil"];
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const text = Object.fromEntries(names.map((name) => [name, value(name)]));
  return { text, idle: channelsOf(text.idle) };
}

function press(id, isPressed) {
  document.getElementById(id).setAttribute("aria-pressed", String(isPressed));
}

/** Show a message below the toolbar, where screen readers announce it. */
function say(text) {
  document.getElementById("status").textContent = text;
}

function showTip(content, event) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = besidePointer(event.clientX, width, innerWidth);
  const top = besidePointer(event.clientY, height, innerHeight);
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

/** Return a position after the pointer, or before it if space is short. */
function besidePointer(at, size, room) {
  return Math.max(4, at + 17 + size > room ? at - size - 12 : at + 17);
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
