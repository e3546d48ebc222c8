// Numbers formatted for people, as in view/units.py.

/** @param {number} value */
function formatNumber(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

/** @param {number} value */
function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(3))} ${units[unit]}`;
}

/** @param {number} value @param {string} unit */
function formatMemory(value, unit) {
  return unit === "bytes" ? formatBytes(value) : `${value} activation${value === 1 ? "" : "s"}`;
}

/** Format memory for the scale of a curve, where room is short. @param {number} value @param {string} unit */
function shortMemory(value, unit) {
  return unit === "bytes" ? formatBytes(value) : `${formatNumber(value)} act.`;
}

/** Return the smallest of 1, 2, 5, 10, ... or 0.5, 0.2, ... that is not below a number. @param {number} atLeast */
function niceStep(atLeast) {
  const power = 10 ** Math.floor(Math.log10(atLeast));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= atLeast) ?? 10 * power;
}

/** Format a time on the axis, with enough digits to distinguish neighbours. @param {number} value @param {number} step */
function formatTick(value, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  if (digits > 12) return value.toPrecision(15);
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** Format a time with seven digits: enough for neighbours, too few for rounding errors. @param {number} value */
function formatTime(value) {
  return Number(value.toPrecision(7)).toLocaleString("en-US", { maximumSignificantDigits: 7 });
}
