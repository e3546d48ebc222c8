// What the page shows outside the pictures: buttons, the line that speaks, the tip at the pointer.

/** The colours of the page's style, for the canvases. */
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

/** Says something below the toolbar, where screen readers hear it. */
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

/** After the pointer, or before it where there is no room. */
function besidePointer(at, size, room) {
  return Math.max(4, at + 17 + size > room ? at - size - 12 : at + 17);
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
