// Zoom of the Timeline by keys, by dragging over a time, or by Ctrl and wheel: each loads a page of another address.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const LEAST_PX = 8;
  const frame = document.getElementById("tl");
  const links = { "+": "tl-in", "=": "tl-in", "-": "tl-out", ArrowLeft: "tl-earlier", ArrowRight: "tl-later", Home: "tl-earlier", End: "tl-now" };
  let from = null;
  let box = null;
  let dragged = false;

  const drawing = () => frame.querySelector("svg.timeline");
  const place = (event) => {
    const area = drawing().getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - area.left) / area.width));
  };
  function moment(share) {
    const { start, edge } = drawing().dataset;
    return Number(start) + share * (Number(edge) - Number(start));
  }
  function go(start, end) {
    const hours = Math.max(1 / 60, (end - start) / 3600);
    location.assign(`/timeline?hours=${hours.toFixed(4)}&end=${Math.round(end)}`);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const link = links[event.key] && document.getElementById(links[event.key]);
    if (!link || (event.key.startsWith("Arrow") && frame.scrollWidth > frame.clientWidth && frame.contains(document.activeElement))) return;
    event.preventDefault();
    location.assign(link.href);
  });

  frame.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    from = place(event);
    dragged = false;
  });
  frame.addEventListener("dragstart", (event) => event.preventDefault());
  window.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    const wide = drawing().getBoundingClientRect().width;
    if (!box && Math.abs(to - from) * wide < LEAST_PX) return;
    dragged = true;
    if (!box) {
      box = document.createElementNS(NS, "rect");
      box.setAttribute("class", "chosen");
      box.setAttribute("y", "0");
      box.setAttribute("height", "100%");
      drawing().append(box);
    }
    box.setAttribute("x", `${Math.min(from, to) * 100}%`);
    box.setAttribute("width", `${Math.abs(to - from) * 100}%`);
  });
  window.addEventListener("pointerup", (event) => {
    if (from !== null && dragged) {
      const [low, high] = [from, place(event)].sort((a, b) => a - b);
      if (high > low) go(moment(low), moment(high));
    }
    box?.remove();
    box = null;
    from = null;
  });
  frame.addEventListener("click", (event) => { if (dragged) { event.preventDefault(); dragged = false; } }, true);
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    document.getElementById(event.deltaY < 0 ? "tl-in" : "tl-out").click();
  }, { passive: false });
})();
