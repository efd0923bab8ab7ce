"use strict";
// Opens the timelines (the one that is shown at once, others when their tab is chosen), sorts tables, and searches for a clicked name.
Syncline.timelines = (() => {
  const opened = new Map();
  const panels = [...document.querySelectorAll(".run")];
  const tabs = [...document.querySelectorAll('[role="tab"]')];

  const open = (number) => {
    if (!opened.has(number)) opened.set(number, Syncline.timeline.open(panels[number], Syncline.spans.trace(number)));
    return opened.get(number);
  };
  const choose = (number) => {
    panels.forEach((panel, i) => { panel.hidden = i !== number; });
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === number));
      tab.tabIndex = i === number ? 0 : -1;
    });
    open(number);
  };
  tabs.forEach((tab, number) => {
    tab.addEventListener("click", () => choose(number));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = (number + by + tabs.length) % tabs.length;
      choose(next);
      tabs[next].focus();
    });
  });

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = Syncline.html("button", { type: "button", class: "sort" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          return down * (Number.isNaN(Number(x)) || Number.isNaN(Number(y)) ? x.localeCompare(y) : x - y);
        });
        table.tBodies[0].replaceChildren(...rows);
      });
    });
  }
  for (const button of document.querySelectorAll("[data-find]")) {
    button.addEventListener("click", () => {
      const panel = button.closest(".run");
      const timeline = open(panels.indexOf(panel));
      panel.querySelector(".timeline").scrollIntoView({ block: "nearest" });
      timeline.find(button.dataset.find);
    });
  }

  const first = Math.max(0, panels.findIndex((panel) => !panel.hidden));
  if (panels.length) open(first);
  const two = document.getElementById("two");
  if (two && panels.length) {
    const runs = panels.map((panel, number) => ({ number, label: tabs[number]?.querySelector("bdi").textContent ?? "this run" }));
    if (runs.length > 1 || open(first).set.steps.length > 1) Syncline.pair.open(two, runs);
  }
  return opened;
})();
