// Reads the embedded data: columns of integers, as columns.py writes them.

// Before a longer column, the browser gets a chance to handle events.
const LONG = 50000;

/** Let the browser handle events between pieces of work. */
function yieldToBrowser() {
  return new Promise((resolve) => setTimeout(resolve));
}

/**
 * Return the columns by name, as typed arrays.
 * @param {{lengths: Record<string, number>, deflated: string}} data
 * @returns {Promise<Record<string, Int32Array>>}
 */
async function readColumns({ lengths, deflated }) {
  const planes = await inflate(deflated);
  /** @type {Record<string, Int32Array>} */
  const columns = {};
  let from = 0;
  for (const [name, length] of Object.entries(lengths)) {
    if (length > LONG) await yieldToBrowser();
    columns[name] = readPlanes(planes.subarray(from, from + 4 * length), length);
    from += 4 * length;
  }
  return columns;
}

/** @param {string} text */
async function inflate(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < packed.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Join the four bytes of each number and undo zigzag: 0, 1, 2, 3 become 0, -1, 1, -2.
 * @param {Uint8Array} planes @param {number} length
 */
function readPlanes(planes, length) {
  const column = new Int32Array(length);
  for (let at = 0; at < length; at++) {
    const zigzag =
      planes[at] |
      (planes[length + at] << 8) |
      (planes[2 * length + at] << 16) |
      (planes[3 * length + at] << 24);
    column[at] = (zigzag >>> 1) ^ -(zigzag & 1);
  }
  return column;
}

/** Return running sums of a column of differences. @param {Int32Array} steps */
function sums(steps) {
  const column = new Int32Array(steps.length);
  let sum = 0;
  for (let at = 0; at < steps.length; at++) column[at] = sum += steps[at];
  return column;
}

/**
 * Look up every number of a column in a table; a loop, because `map` is slow here.
 * @param {ArrayLike<number>} table @param {Int32Array} column
 */
function pick(table, column) {
  const picked = new Int32Array(column.length);
  for (let at = 0; at < column.length; at++) picked[at] = table[column[at]];
  return picked;
}

/** @param {Int32Array} column @param {number} factor */
function scaled(column, factor) {
  const products = new Float64Array(column.length);
  for (let at = 0; at < column.length; at++) products[at] = column[at] * factor;
  return products;
}

/** Return the start of each part of a column of sizes, and the end of the last. @param {ArrayLike<number>} sizes */
function bounds(sizes) {
  const first = new Int32Array(sizes.length + 1);
  for (let at = 0; at < sizes.length; at++) first[at + 1] = first[at] + sizes[at];
  return first;
}
