// Tables that are sorted by a click on a heading; another click turns the order round.

function makeSortable(table) {
  const headings = [...table.querySelectorAll("thead th")];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    if (button.textContent === "") button.textContent = "name";
    button.addEventListener("click", () => {
      const isRising = heading.getAttribute("aria-sort") !== "ascending";
      for (const each of headings) each.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", isRising ? "ascending" : "descending");
      sortRows(table.tBodies[0], column, isRising ? 1 : -1);
    });
    heading.append(button);
  });
}

function sortRows(body, column, direction) {
  const keyed = [...body.rows].map((row) => ({ row, key: sortKey(row.cells[column].textContent) }));
  keyed.sort((one, other) => direction * compareKeys(one.key, other.key));
  body.append(...keyed.map(({ row }) => row));
}

/** Return the number in a cell, with its unit of bytes taken into account, or its text. */
function sortKey(text) {
  const match = /^([+−-]?)([\d.,]+)(?:e([+-]?\d+))?(?: (B|KiB|MiB|GiB|TiB|PiB|%|s))?$/.exec(text.trim());
  if (!match) return text;
  const [, sign, digits, power = "0", unit] = match;
  const scale = 1024 ** Math.max(0, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].indexOf(unit ?? "B"));
  return (sign === "−" || sign === "-" ? -1 : 1) * Number(digits.replaceAll(",", "")) * 10 ** Number(power) * scale;
}

/** Numbers come before text. */
function compareKeys(one, other) {
  if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other);
  return typeof one === "number" ? -1 : 1;
}
