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
// What a chart says where the pointer or a finger is; the arrow keys go through it, Escape ends it.
for (const box of document.querySelectorAll(".picture[data-readings]")) {
  const panels = JSON.parse(box.dataset.readings), image = box.firstElementChild;
  const stops = panels.flatMap((panel, i) => panel.texts.map((text, n) => text ? [i, n] : null)).filter(Boolean);
  const note = document.createElement("output"), mark = document.createElement("i");
  note.className = "reading";
  mark.className = "mark";
  box.after(note, mark);
  box.tabIndex = 0;
  for (const title of box.querySelectorAll("title")) title.remove();
  let current = -1;
  const hide = () => { note.hidden = mark.hidden = true; };
  // `at` is where the pointer is, in 1/10,000 of the chart; without it the note stands at the mark.
  const show = (i, n, at) => {
    const { box: [left, top, right, bottom], x, y, holds, texts } = panels[i];
    if (!texts[n]) { hide(); return; }
    current = stops.findIndex(([panel, stop]) => panel === i && stop === n);
    const inner = image.getBoundingClientRect(), outer = box.parentNode.getBoundingClientRect();
    const across = share => inner.left - outer.left + share * inner.width / 1e4;
    const down = share => inner.top - outer.top + share * inner.height / 1e4;
    const [from, above] = [x ? x[n] : left, y ? y[n] : top];
    const until = holds ? Math.min(x[n + 1] ?? right, right) : x ? from : right;
    Object.assign(mark.style, {
      left: `${across(from)}px`, width: `${across(until) - across(from)}px`,
      top: `${down(above)}px`, height: `${y ? 0 : down(bottom) - down(above)}px`,
    });
    note.textContent = texts[n];
    note.hidden = mark.hidden = false;
    const [px, py] = at ?? [from, y ? above : top];
    const beside = Math.min(Math.max(0, across(px) + 12), outer.width - note.offsetWidth);
    const below = down(py) + 16, over = down(py) - note.offsetHeight - 10;
    note.style.left = `${beside}px`;
    note.style.top = `${py > 5e3 ? over : below}px`;
  };
  const nearest = ({ x, y, holds, texts }, px, py) => {
    let found = -1, least = Infinity;
    texts.forEach((_, n) => {
      const aside = x ? px - x[n] : 0, away = holds && aside < 0 ? Infinity : Math.hypot(aside, y ? py - y[n] : 0);
      if (away < Infinity && away <= least) [found, least] = [n, away];
    });
    return found;
  };
  const point = event => {
    const inner = image.getBoundingClientRect();
    const px = 1e4 * (event.clientX - inner.left) / inner.width, py = 1e4 * (event.clientY - inner.top) / inner.height;
    const i = panels.findIndex(({ box: [left, top, right, bottom] }) =>
      px >= left - 50 && px <= right + 50 && py >= top && py <= bottom);
    if (i < 0) hide();
    else show(i, nearest(panels[i], px, py), [px, py]);
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
  box.addEventListener("scroll", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (event.key === "Enter") box.classList.toggle("large");
    if (!step) return;
    event.preventDefault();
    let next = Math.min(Math.max(0, current + step), stops.length - 1);
    if (current >= 0 && panels.length > 1 && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      const other = Math.min(Math.max(0, stops[current][0] + step), panels.length - 1);
      next = stops.findIndex(([panel]) => panel === other);
    }
    if (next >= 0) show(...stops[next]);
  });
  hide();
}
// Series of a chart can be hidden; in print they are all there.
for (const chart of document.querySelectorAll(".picture[data-names]")) {
  const box = chart.previousElementSibling;
  JSON.parse(chart.dataset.names).forEach((name, number) => {
    const label = document.createElement("label"), tick = document.createElement("input");
    tick.type = "checkbox";
    tick.checked = true;
    tick.addEventListener("change", () => {
      for (const part of chart.querySelectorAll(`[data-series="${number}"]`)) part.classList.toggle("off", !tick.checked);
    });
    label.append(tick, " " + name);
    box.append(label);
  });
}
