"use strict";
// Adds sorting and filtering to tables with `data-tools`, whose value names the rows. Without scripts they are plain.
(() => {
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  function valueOf(row, column, isNumber) {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return isNumber ? (text === "" ? NaN : Number(text)) : text;
  }

  function compare(a, b, isNumber) {
    if (!isNumber) return words.compare(a, b);
    return a === b ? 0 : a - b;
  }

  function isEmpty(value, isNumber) {
    return isNumber ? Number.isNaN(value) : value === "";
  }

  function sortBy(table, column) {
    const headers = [...table.tHead.rows[0].cells];
    const header = headers[column];
    const isNumber = header.classList.contains("number");
    const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, column, isNumber) }));
    rows.sort((a, b) => {
      // Rows without a value are last in both directions.
      const order = isEmpty(a.value, isNumber) - isEmpty(b.value, isNumber);
      if (order || isEmpty(a.value, isNumber)) return order;
      return sign * compare(a.value, b.value, isNumber);
    });
    body.append(...rows.map(({ row }) => row));
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
  }

  function addSorting(table) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      if (!("sort" in header.dataset)) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sortBy(table, column));
      header.append(button);
    });
  }

  function addFilter(table) {
    const name = table.dataset.tools;
    const rows = [...table.tBodies[0].rows];
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const input = document.createElement("input");
    const label = document.createElement("label");
    const count = document.createElement("span");
    const tools = document.createElement("div");
    input.type = "search";
    label.append(`Filter ${name}: `, input);
    count.setAttribute("role", "status");
    count.className = "muted";
    tools.className = "filter";
    tools.append(label, count);
    (table.closest(".scroll") ?? table).before(tools);
    const update = () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !wanted.every((word) => texts.get(row).includes(word));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    };
    input.addEventListener("input", update);
    update();
  }

  for (const table of document.querySelectorAll("table[data-tools]")) {
    addSorting(table);
    addFilter(table);
  }

  // Events of players do not bubble, so they are captured.
  document.addEventListener("play", ({ target }) => {
    for (const player of document.querySelectorAll("audio")) if (player !== target) player.pause();
  }, true);
  document.addEventListener("error", ({ target }) => {
    if (!(target instanceof HTMLAudioElement) || target.nextElementSibling) return;
    const note = document.createElement("span");
    note.setAttribute("role", "alert");
    note.textContent = "cannot be played: is the file still beside this page?";
    target.after(note);
  }, true);
})();
