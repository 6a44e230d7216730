"use strict";
// Sortable tables: a click on a heading sorts by it, another one the other way round.
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const column = [...head.parentNode.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.children[column].textContent.trim();
    const number = text => /^[-+–−]?[\d.,]+/.test(text) ? parseFloat(text.replaceAll(",", "").replace("−", "-")) : NaN;
    const body = head.closest("table").tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], [m, n] = [number(x), number(y)];
      // What is unknown comes last, either way.
      if (isNaN(m) !== isNaN(n)) return isNaN(m) - isNaN(n);
      return (up ? 1 : -1) * (isNaN(m) ? x.localeCompare(y) : m - n);
    });
    body.append(...rows);
  });
}
// A slider in place of several pictures of one kind.
for (const group of document.querySelectorAll(".slides")) {
  const figures = [...group.querySelectorAll("figure")];
  const label = document.createElement("label"), output = document.createElement("output");
  const slider = document.createElement("input");
  slider.type = "range";
  slider.min = 0;
  slider.max = figures.length - 1;
  slider.value = group.dataset.first;
  const show = () => {
    figures.forEach((figure, number) => { figure.hidden = number !== Number(slider.value); });
    output.textContent = figures[slider.value].dataset.name;
  };
  slider.addEventListener("input", show);
  label.append(group.dataset.label + " ", slider, " ", output);
  group.prepend(label);
  show();
  window.addEventListener("beforeprint", () => { for (const figure of figures) figure.hidden = false; });
  window.addEventListener("afterprint", show);
}
// Charts fit the window; a click shows one in full size, another one makes it fit again. A finger has a button.
for (const box of document.querySelectorAll(".picture")) {
  const button = document.createElement("button"), row = document.createElement("p");
  button.type = "button";
  button.className = "enlarge";
  button.textContent = "full size";
  button.addEventListener("click", () => box.classList.toggle("large"));
  box.addEventListener("click", event => { if (event.pointerType !== "touch") box.classList.toggle("large"); });
  row.className = "toggles";
  row.append(button);
  box.before(row);
}
