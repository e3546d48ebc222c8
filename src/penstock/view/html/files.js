// The pictures as files: what the canvases show, as PNG, or drawn again as SVG.

const FILE_GAP = 16;
const HEADING = 22;

/** Return the pictures of all panels below one another, as a blob. */
function pngOf(app) {
  const { width, height, tops } = fileLayout(app);
  const ratio = app.panels[0].ratio;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(width * ratio), Math.ceil(height * ratio)];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  paintFile(context, app, width, height, tops);
  app.panels.forEach((panel, at) => {
    for (const { canvas: source } of panel.contexts) {
      context.drawImage(source, 0, tops[at], source.width / ratio, source.height / ratio);
    }
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** Return the pictures of all panels below one another, as the text of an SVG file. */
function svgOf(app) {
  const { width, height, tops } = fileLayout(app);
  const svg = new SvgContext(width, height);
  paintFile(svg, app, width, height, tops);
  app.panels.forEach((panel, at) => {
    svg.moveBy(tops[at]);
    paintPanel(svg, panel, app.colours);
    svg.moveBy(0);
  });
  return svg.end();
}

function fileLayout(app) {
  const tops = [];
  let height = 0;
  for (const panel of app.panels) {
    tops.push(height + HEADING);
    height += HEADING + panel.lanes.height + FILE_GAP;
  }
  const { margin, width } = app.panels[0].lanes;
  return { width: margin + width + 8, height, tops };
}

function paintFile(context, app, width, height, tops) {
  context.fillStyle = app.colours.text.card;
  context.fillRect(0, 0, width, height);
  app.panels.forEach((panel, at) => {
    context.fillStyle = app.colours.text.ink;
    context.font = FONT.replace("11px", "13px");
    context.textAlign = "left";
    context.textBaseline = "middle";
    const figures = panel.element.parentElement.querySelector(".figures").textContent;
    context.fillText(`${panel.timeline.title}: ${figures}`, 8, tops[at] - HEADING / 2);
  });
}

/** The part of a canvas's drawing commands that `paintPanel` uses, written as SVG. */
class SvgContext {
  constructor(width, height) {
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    this.parts = [`<svg xmlns="http://www.w3.org/2000/svg" ${size}>`];
    this.top = 0;
    this.path = "";
    this.clips = [];
    this.numClips = 0;
    this.globalAlpha = 1;
    this.lineWidth = 1;
    this.fillStyle = this.strokeStyle = "none";
    this.font = "11px sans-serif";
    this.textAlign = "left";
    this.textBaseline = "middle";
  }

  /** Draw what follows this far below the top. */
  moveBy(top) {
    this.top = top;
  }

  setTransform() {}

  clearRect() {}

  save() {
    this.clips.push(0);
  }

  restore() {
    this.parts.push("</g>".repeat(this.clips.pop()));
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${short(x)} ${short(y + this.top)}`;
  }

  lineTo(x, y) {
    this.path += `L${short(x)} ${short(y + this.top)}`;
  }

  rect(x, y, width, height) {
    this.path += `M${short(x)} ${short(y + this.top)}h${short(width)}v${short(height)}h${short(-width)}Z`;
  }

  clip() {
    const name = `clip${this.numClips++}`;
    this.parts.push(`<clipPath id="${name}"><path d="${this.path}"/></clipPath><g clip-path="url(#${name})">`);
    this.clips[this.clips.length - 1]++;
  }

  fill() {
    this.parts.push(`<path d="${this.path}" fill="${this.fillStyle}"${this.opacity()}/>`);
  }

  stroke() {
    this.parts.push(`<path d="${this.path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"/>`);
  }

  fillRect(x, y, width, height) {
    const box = `x="${short(x)}" y="${short(y + this.top)}" width="${short(Math.max(0, width))}" height="${short(height)}"`;
    this.parts.push(`<rect ${box} fill="${this.fillStyle}"${this.opacity()}/>`);
  }

  strokeRect(x, y, width, height) {
    this.beginPath();
    this.rect(x, y, width, height);
    this.stroke();
  }

  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const baseline = this.textBaseline === "top" ? "hanging" : "central";
    const [, size] = /([\d.]+)px/.exec(this.font);
    const safe = text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    const look = `font-family="system-ui, sans-serif" font-size="${size}" text-anchor="${anchor}" dominant-baseline="${baseline}"`;
    this.parts.push(`<text x="${short(x)}" y="${short(y + this.top)}" fill="${this.fillStyle}" ${look}>${safe}</text>`);
  }

  /** Write a lane of the overview, which is an image, as boxes of one colour each. */
  drawImage(canvas, left, top, columns, lines, x, y, width, height) {
    const pixels = new Uint32Array(canvas.getContext("2d").getImageData(left, top, columns, lines).data.buffer);
    const [across, down] = [width / columns, height / lines];
    for (let line = 0; line < lines; line++) {
      for (let from = 0, to = 0; from < columns; from = to) {
        const pixel = pixels[line * columns + from];
        while (to < columns && pixels[line * columns + to] === pixel) to++;
        const bytes = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
        this.fillStyle = `#${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
        this.fillRect(x + from * across, y + line * down, (to - from) * across, down);
      }
    }
  }

  opacity() {
    return this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : "";
  }

  end() {
    return `${this.parts.join("\n")}\n</svg>\n`;
  }
}

function short(value) {
  return Math.round(value * 100) / 100;
}

/** Let the browser save a file. */
function saveFile(blob, name) {
  const link = document.createElement("a");
  [link.href, link.download] = [URL.createObjectURL(blob), name];
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
