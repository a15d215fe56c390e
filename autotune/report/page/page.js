"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures-data").textContent);
  const command = JSON.parse(document.getElementById("command").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const options = { responsive: true, displayModeBar: false };
  const isTouched = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page, and must not zoom
  const places = [...document.querySelectorAll(".figure")];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Text, grid and ground by the page's own colours; the paper is left to it.
  function theme(layout) {
    const found = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": colour("--text"),
      "font.family": getComputedStyle(document.body).fontFamily,
      "font.size": 12,
      "legend.bgcolor": "rgba(0,0,0,0)",
      "hoverlabel.bgcolor": colour("--hover"),
      "hoverlabel.bordercolor": colour("--line"),
      "hoverlabel.font.color": colour("--text"),
    };
    for (const axis of ["xaxis", "yaxis"]) {
      if (layout[axis]) {
        found[`${axis}.gridcolor`] = colour("--grid");
        found[`${axis}.linecolor`] = colour("--line");
        found[`${axis}.title.font.color`] = colour("--quiet");
      }
    }
    return found;
  }

  function themed(layout) {
    const made = structuredClone(layout);
    made.dragmode = isTouched ? false : "zoom";
    for (const [path, value] of Object.entries(theme(layout))) {
      const names = path.split(".");
      const last = names.pop();
      const inner = names.reduce((part, name) => (part[name] ??= {}), made);
      inner[last] = value;
    }
    return made;
  }

  const drawn = new Set();
  function draw(place, width) {
    const figure = figures[place.id];
    if (!figure) return;
    drawn.add(place);
    const layout = themed(figure.layout);
    Plotly.newPlot(place, figure.data, width ? { ...layout, width } : layout, options);
    if (place.id === "speed-and-memory") place.on("plotly_click", pick);
  }

  // A click on a trial names the command that measures its settings again.
  function pick(event) {
    const [trial, options, settings] = event.points[0].customdata ?? [];
    if (trial === undefined) return;
    const box = document.getElementById("picked");
    box.hidden = false;
    const texts = { "measure it again": options ? `${command} ${options}` : command, "its settings, where they are not the baseline's": settings };
    for (const [index, [name, text]] of Object.entries(texts).entries()) {
      const place = box.querySelectorAll(".code")[index];
      place.hidden = !text;
      place.querySelector(".code-head span").textContent = `trial ${trial}: ${name}`;
      place.querySelector("code").textContent = text;
    }
  }

  // A figure is drawn when it comes near, so that a long page opens at once; all are drawn for printing.
  const near = new IntersectionObserver(
    (entries) => entries
      .filter((entry) => entry.isIntersecting && !drawn.has(entry.target))
      .forEach((entry) => draw(entry.target)),
    { rootMargin: "800px" },
  );
  for (const place of places) {
    place.style.minHeight = `${figures[place.id]?.layout.height ?? 0}px`;
    near.observe(place);
  }

  const repaint = () => drawn.forEach((place) => Plotly.relayout(place, theme(place.layout)));
  dark.addEventListener("change", repaint);

  const PAPER = 680; // CSS pixels of an A4 page between its margins
  const light = { "--text": "#000000", "--quiet": "#4a4f58", "--line": "#cfd3da", "--grid": "#e4e7ec", "--hover": "#ffffff" };
  addEventListener("beforeprint", () => {
    for (const [name, value] of Object.entries(light)) document.documentElement.style.setProperty(name, value);
    for (const place of places) draw(place, place.closest(".pair, .grid") ? PAPER / 2 - 12 : PAPER);
  });
  addEventListener("afterprint", () => {
    for (const name of Object.keys(light)) document.documentElement.style.removeProperty(name);
    drawn.forEach((place) => draw(place));
  });

  // Where the browser gives no clipboard to a page from disk, the text is selected and copied the old way.
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.style.position = "fixed";
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    const done = await copy(button.closest(".code").querySelector("code").textContent);
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function choose(tab) {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
  }
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(index + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  }
})();
