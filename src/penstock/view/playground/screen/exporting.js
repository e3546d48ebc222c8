// Files of the picture and the order: SVG, PNG, CSV.

const FILE_WIDTH = 1200;
const FILE_MARGIN = 12;

/** Draw a timeline with its heading on a surface that `start` makes.
 * @param {Timeline} timeline @param {string} heading @param {any} shades @param {Record<string, string>} colours
 * @param {(width: number, height: number) => any} start */
function drawFile(timeline, heading, shades, colours, start) {
  const [left, top] = [FILE_MARGIN + 52, 40];
  const width = FILE_WIDTH - left - FILE_MARGIN - 8;
  const frame = { left, top, scale: 1, scrolled: 0, width, lane: 42, bar: 24, curve: 13 };
  const height = top + timeline.schedule.numRanks * frame.lane + AXIS + FILE_MARGIN;
  const surface = start(FILE_WIDTH, height);
  surface.rect({ left: 0, top: 0, width: FILE_WIDTH, height }, { fill: colours.card });
  surface.text(heading, FILE_MARGIN, 20, { size: 14, fill: colours.ink });
  const painter = new Painter(timeline, frame, shades, colours);
  frame.scale = width / (painter.extent || 1);
  painter.draw(surface, Infinity);
  painter.drawLabels(surface);
  return surface;
}

/** @param {Timeline} timeline @param {string} heading @param {any} shades @param {Record<string, string>} colours */
function svgFile(timeline, heading, shades, colours) {
  return drawFile(timeline, heading, shades, colours, (width, height) => new SvgSurface(width, height)).end();
}

/** @param {Timeline} timeline @param {string} heading @param {any} shades @param {Record<string, string>} colours @returns {Promise<Blob>} */
function pngFile(timeline, heading, shades, colours) {
  const canvas = document.createElement("canvas");
  drawFile(timeline, heading, shades, colours, (width, height) => new CanvasSurface(canvas, width, height, 2));
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser made no PNG"))), "image/png");
  });
}

/** Let the browser save a file. @param {Blob} blob @param {string} name */
function download(blob, name) {
  const link = make("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
