"use strict";
// Sorts tables by their headers and filters long ones. Without this the page is complete, in the order of the model.
(() => {
  const order = new Intl.Collator("en", { numeric: true });
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const key = cell.dataset.key === undefined ? cell.textContent.trim() : cell.dataset.key;
    return key === "–" ? "" : key;
  };
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? order.compare(a, b) : x - y;
  };
  const sort = (table, column) => {
    const heads = table.tHead.rows[0].cells;
    const head = heads[column];
    const was = head.getAttribute("aria-sort");
    // Figures are most interesting from the largest on.
    const first = head.classList.contains("figure") ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    const now = was === first ? second : first;
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", now);
    const turn = now === "ascending" ? 1 : -1;
    const rows = Array.from(table.tBodies[0].rows, (row) => [row, keyOf(row, column)]);
    // What has no value stands last, either way.
    rows.sort(([, a], [, b]) => (a === "" || b === "" ? (a === "") - (b === "") : turn * compare(a, b)));
    table.tBodies[0].append(...rows.map(([row]) => row));
  };
  const addFilter = (table) => {
    const box = document.createElement("div");
    const label = document.createElement("label");
    const input = document.createElement("input");
    const found = document.createElement("output");
    box.className = "filter";
    input.type = "search";
    input.setAttribute("aria-label", "Show only rows with this text");
    input.placeholder = "Show only rows with…";
    label.append(input);
    box.append(label, found);
    table.parentElement.before(box);
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        shown += row.hidden ? 0 : 1;
      }
      found.textContent = wanted ? `${shown} of ${table.tBodies[0].rows.length}` : "";
    });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    if (table.tBodies[0].rows.length < 2) continue;
    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, column));
    });
    if (table.tBodies[0].rows.length > 12) addFilter(table);
  }
})();
