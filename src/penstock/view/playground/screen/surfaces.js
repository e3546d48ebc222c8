// Two surfaces to draw on with the same strokes: a canvas, and the text of an SVG file.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/**
 * @typedef {{left: number, top: number, width: number, height: number}} Box
 * @typedef {{fill?: string, line?: string, opacity?: number, radius?: number}} Look
 * @typedef {{size: number, fill: string, align?: "left" | "center" | "right"}} TextLook
 */

class CanvasSurface {
  /** @param {any} canvas @param {number} width @param {number} height @param {number} scale */
  constructor(canvas, width, height, scale) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    if (canvas.style) Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    this.context = canvas.getContext("2d");
    this.context.scale(scale, scale);
  }

  /** @param {Box} box @param {Look} look */
  rect({ left, top, width, height }, { fill, line, opacity = 1, radius = 0 }) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.beginPath();
    if (radius) context.roundRect(left, top, width, height, radius);
    else context.rect(left, top, width, height);
    if (fill) Object.assign(context, { fillStyle: fill }).fill();
    if (line) Object.assign(context, { strokeStyle: line, lineWidth: 1 }).stroke();
    context.globalAlpha = 1;
  }

  /** @param {string} text @param {number} x @param {number} y @param {TextLook} look */
  text(text, x, y, { size, fill, align = "left" }) {
    const font = `${size}px ${FONT}`;
    Object.assign(this.context, { font, fillStyle: fill, textAlign: align, textBaseline: "middle" });
    this.context.fillText(text, x, y);
  }

  /** @param {[number, number][]} points @param {string} colour @param {number} [width] */
  path(points, colour, width = 1) {
    const { context } = this;
    context.beginPath();
    points.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
    Object.assign(context, { strokeStyle: colour, lineWidth: width }).stroke();
  }
}

class SvgSurface {
  /** @param {number} width @param {number} height */
  constructor(width, height) {
    const [w, h] = [round(width), round(height)];
    this.parts = [`<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}">`];
  }

  /** @param {Box} box @param {Look} look */
  rect({ left, top, width, height }, { fill = "none", line, opacity = 1, radius = 0 }) {
    const more = `${line ? ` stroke="${line}"` : ""}${opacity < 1 ? ` opacity="${opacity}"` : ""}${radius ? ` rx="${radius}"` : ""}`;
    this.parts.push(`<rect x="${round(left)}" y="${round(top)}" width="${round(width)}" height="${round(height)}" fill="${fill}"${more}/>`);
  }

  /** @param {string} text @param {number} x @param {number} y @param {TextLook} look */
  text(text, x, y, { size, fill, align = "left" }) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    const safe = text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    this.parts.push(`<text x="${round(x)}" y="${round(y)}" font-size="${size}" font-family="${FONT}" fill="${fill}" text-anchor="${anchor}" dominant-baseline="central">${safe}</text>`);
  }

  /** @param {[number, number][]} points @param {string} colour @param {number} [width] */
  path(points, colour, width = 1) {
    const list = points.map(([x, y]) => `${round(x)},${round(y)}`).join(" ");
    this.parts.push(`<polyline points="${list}" fill="none" stroke="${colour}" stroke-width="${width}"/>`);
  }

  end() {
    return `${this.parts.join("\n")}\n</svg>\n`;
  }
}

/** @param {number} value */
function round(value) {
  return Math.round(value * 1000) / 1000;
}
