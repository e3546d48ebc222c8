// Reads what the page carries: columns of whole numbers, as page_columns.py writes them.

// After a column that is longer, the browser gets a chance to answer.
const LONG = 50000;

/** Lets the browser answer between pieces of work, each of which is short. */
function breathe() {
  return new Promise((resolve) => setTimeout(resolve));
}

/** The columns by name, as typed arrays. */
async function readColumns({ lengths, deflated }) {
  const planes = await inflate(deflated);
  const columns = {};
  let from = 0;
  for (const [name, length] of Object.entries(lengths)) {
    if (length > LONG) await breathe();
    columns[name] = readPlanes(planes.subarray(from, from + 4 * length), length);
    from += 4 * length;
  }
  return columns;
}

async function inflate(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < packed.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Puts the four bytes of each number together, and undoes zigzag: 0, 1, 2, 3 are 0, -1, 1, -2. */
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

/** Running sums, for columns that carry how much each number is above the one before. */
function sums(steps) {
  const column = new Int32Array(steps.length);
  let sum = 0;
  for (let at = 0; at < steps.length; at++) column[at] = sum += steps[at];
  return column;
}

/** For every number of a column, what a table has in its place. Loops, for `map` is slow here. */
function pick(table, column) {
  const picked = new Int32Array(column.length);
  for (let at = 0; at < column.length; at++) picked[at] = table[column[at]];
  return picked;
}

function scaled(column, factor) {
  const products = new Float64Array(column.length);
  for (let at = 0; at < column.length; at++) products[at] = column[at] * factor;
  return products;
}

/** For a column of sizes, where each part begins, and at last where all end. */
function bounds(sizes) {
  const first = new Int32Array(sizes.length + 1);
  for (let at = 0; at < sizes.length; at++) first[at + 1] = first[at] + sizes[at];
  return first;
}
