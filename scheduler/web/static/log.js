// The log of a job: follows new output, loads earlier parts, searches the shown part or the whole log.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const view = at("log");
  const follow = at("log-follow");
  const wrap = at("log-wrap");
  const word = at("log-word");
  const says = at("log-says");
  const found = at("log-found");
  const none = at("log-none");
  const part = at("log-part");
  const address = view.dataset.log;
  const LOOK_MS = 1000;
  const SOME_LINES = 1000; // that are loaded at first, and by each click on "earlier"
  const MOST_SHOWN = 2000000; // characters: limits the work of the browser
  const PIECE = 200000; // characters: small answers are joined into pieces up to this size
  const MOST_MARKED = 5000;
  const LONGEST_OPEN = 65536; // bytes of an unfinished line, at most; the server sends a longer one in parts
  const rest = document.createElement("span"); // the unfinished last line
  let pieces = []; // the shown parts of the log, in order: {text, start: byte where the text begins, lines}
  let loose = "";
  let end = null; // byte up to which the log is shown; null: nothing was read yet
  let size = 0; // bytes of the log
  let away = false; // whether the end of the log is not shown; then new output is not appended
  let attempt = "";
  let busy = Promise.resolve(); // the request that is being made
  let reading = false;
  let marks = [];
  let here = -1; // index of the current mark
  let first = false; // go to the first mark when text arrives: no text is loaded yet, or it is being loaded again
  let looked = ""; // the word of the search shown in `found`
  let trouble = "";

  const atEnd = () => view.scrollHeight - view.scrollTop - view.clientHeight < 40;
  const toEnd = () => { view.scrollTop = view.scrollHeight; };
  const running = () => ["starting", "running", "stopping", "pending"].includes(at("job-head").dataset.state);
  const shown = () => pieces.reduce((sum, one) => sum + one.text.length, 0);
  const piece = (text, start) => ({ text, start, lines: text.split("\n").length - 1 + (text !== "" && !text.endsWith("\n")) });

  /** Return `text` as nodes, with the searched word marked. The text is never parsed as HTML. */
  function marked(text, most = MOST_MARKED) {
    const out = document.createDocumentFragment();
    const wanted = word.value.toLowerCase();
    const low = wanted ? text.toLowerCase() : "";
    let from = 0;
    let number = 0;
    for (let next = wanted ? low.indexOf(wanted) : -1; next >= 0 && number < most; next = low.indexOf(wanted, from)) {
      const mark = document.createElement("mark");
      mark.textContent = text.slice(next, next + wanted.length);
      out.append(text.slice(from, next), mark);
      from = next + wanted.length;
      number += 1;
    }
    out.append(text.slice(from));
    return out;
  }

  function bytes(number) {
    const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, number)) / 10)));
    return `${(number / 1024 ** unit).toFixed(unit ? 1 : 0)} ${["bytes", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  }

  /** Show the number of the current mark, the number of marks, and which part of the log is shown. */
  function tell() {
    const many = marks.length < MOST_MARKED ? marks.length : `${MOST_MARKED} or more`;
    const hits = !word.value ? "" : !marks.length ? "no match in the shown part" : here < 0 ? `${many} matches` : `${here + 1} of ${many}`;
    const text = [trouble, hits].filter(Boolean).join("; ");
    if (says.textContent !== text) says.textContent = text;
    // "next" stays enabled: Enter does not submit a form whose button is disabled.
    at("log-before").disabled = !marks.length;
    const begin = pieces.length ? pieces[0].start : 0;
    part.hidden = !begin && !away;
    at("log-earlier").hidden = !begin;
    if (part.hidden) return;
    const lines = pieces.reduce((sum, one) => sum + one.lines, 0);
    const all = end > begin ? Math.round((lines * size) / (end - begin)) : lines;
    const digits = 10 ** Math.max(0, String(all).length - 2);
    const about = (Math.round(all / digits) * digits).toLocaleString("en");
    const which = `${away ? "Part of the log, without its end:" : "The last"} ${lines.toLocaleString("en")} lines of about ${about} (${bytes(size)}).`;
    if (at("log-which").textContent !== which) at("log-which").textContent = which;
  }

  function redraw() {
    const back = here < 0 ? 0 : marks.length - here; // from the end: text mostly changes before the current mark
    view.replaceChildren(marked(pieces.map((one) => one.text).join("")), rest);
    rest.replaceChildren(marked(loose));
    none.hidden = shown() + loose.length > 0;
    here = -1;
    count();
    if (back && back <= marks.length) here = marks.length - back;
    marks[here]?.classList.add("here");
    tell();
  }

  function count() {
    const old = marks[here];
    marks = [...view.querySelectorAll("mark")];
    here = old ? marks.indexOf(old) : -1;
    tell();
  }

  /** Append `whole` lines, which begin at byte `start`, and the unfinished line `open`, which is sent again later. */
  function add(whole, open, start) {
    if (!whole && open === loose) return tell();
    const stay = !follow.checked;
    loose = open;
    const last = pieces[pieces.length - 1];
    if (last && last.text.length + whole.length < PIECE) Object.assign(last, piece(last.text + whole, last.start));
    else if (whole) pieces.push(piece(whole, start));
    if (shown() > MOST_SHOWN && pieces.length > 1) {
      while (shown() > MOST_SHOWN && pieces.length > 1) pieces.shift();
      redraw();
    } else {
      rest.before(marked(whole, MOST_MARKED - marks.length));
      rest.replaceChildren(marked(open, MOST_MARKED - marks.length));
      none.hidden = shown() + loose.length > 0;
      count();
    }
    if (first && marks.length) go(0);
    else if (!stay) toEnd();
  }

  /** Return the index where the last `number` characters begin; a surrogate pair counts as one character. */
  function before(text, number) {
    let place = text.length;
    for (let left = number; left > 0 && place > 0; left -= 1) {
      place -= 1;
      if (place > 0 && text.charCodeAt(place) >= 0xdc00 && text.charCodeAt(place) < 0xe000) place -= 1;
    }
    return place;
  }

  /** Fetch a part of the log: {text, told: returns a header's value}; null on an error. */
  async function get(query) {
    const answer = await fetch(address + query, { credentials: "same-origin" }).catch(() => null);
    trouble = answer ? "" : "cannot read the log; trying again";
    if (!answer || !answer.ok) return null;
    const text = await answer.text().catch(() => null);
    return text === null ? null : { text, told: (name) => answer.headers.get(`X-Gpujob-Log-${name}`) };
  }

  /** Run `work` after the requests that are being made, so that only one runs at a time. */
  function alone(work) {
    busy = busy.then(work, work).finally(tell);
    return busy;
  }

  function forget() {
    first ||= here >= 0;
    pieces = [];
    loose = "";
    away = false;
    here = -1;
  }

  async function read() {
    if (document.hidden || reading) return;
    reading = true;
    await alone(readOn).finally(() => { reading = false; });
  }

  async function readOn() {
    if (away) return;
    const answer = await get(end === null ? `?tail=${SOME_LINES}` : `?from=${end}`);
    if (!answer) return;
    const { text, told } = answer;
    const place = before(text, Number(told("Unfinished") || 0));
    const which = told("Attempt") ?? attempt;
    const anew = told("Restarted") !== null || which !== attempt;
    const other = end !== null && anew && told("Restarted") === null; // another attempt: read its log next
    if (end === null || anew) {
      forget();
      redraw();
    }
    attempt = which;
    size = Number(told("Size") || 0);
    end = other ? null : Number(told("End") || 0);
    if (!other) add(text.slice(0, place), text.slice(place), Number(told("Start") || 0));
  }

  const earlier = () => alone(async () => {
    const answer = await get(`?before=${pieces[0].start}&tail=${SOME_LINES}&attempt=${attempt}`);
    if (!answer || !pieces.length) return;
    const high = view.scrollHeight;
    const top = view.scrollTop;
    follow.checked = false;
    pieces.unshift(piece(answer.text, Number(answer.told("Start"))));
    while (shown() > MOST_SHOWN && pieces.length > 1) {
      end = pieces.pop().start;
      loose = "";
      away = true;
    }
    redraw();
    view.scrollTop = top + view.scrollHeight - high; // keep the lines on the screen in place
  });

  /** Show the log from this byte on. */
  const show = (place) => alone(async () => {
    const answer = await get(`?from=${place}&attempt=${attempt}`);
    if (!answer) return;
    forget();
    follow.checked = false;
    size = Number(answer.told("Size"));
    end = Number(answer.told("End"));
    const cut = before(answer.text, Number(answer.told("Unfinished") || 0));
    pieces = [piece(answer.text.slice(0, cut), place)];
    loose = answer.text.slice(cut);
    away = size - end > LONGEST_OPEN;
    redraw();
    view.scrollTop = 0;
    go(0);
    view.focus();
    if (!away) read();
  });

  /** Go to the mark with this index; after the last mark comes the first, and before the first the last. */
  function go(number) {
    first = false;
    marks[here]?.classList.remove("here");
    here = marks.length ? (number + marks.length) % marks.length : -1;
    if (here >= 0) {
      follow.checked = false;
      marks[here].classList.add("here");
      const box = marks[here].getBoundingClientRect();
      const frame = view.getBoundingClientRect();
      if (box.top < frame.top || box.bottom > frame.bottom) view.scrollTop += box.top - frame.top - frame.height / 2;
      marks[here].scrollIntoView({ block: "nearest" }); // scrolls the page if a part of the log is outside the window
    }
    tell();
  }

  function typed() {
    if (looked !== word.value) {
      found.hidden = true;
      found.replaceChildren();
    }
    first = word.value !== "";
    if (end === null) return; // the log is not loaded yet: the shown text is from the server's page
    redraw();
    go(0);
  }

  /** Return a found line; its number is a link to its place in the log. */
  function line(text, place) {
    const [, number, body] = /^(-?\d+):(.*)$/s.exec(text) || [null, "", text];
    const out = document.createDocumentFragment();
    if (number && place) {
      const link = document.createElement("a");
      link.href = `${address}?from=${place}&attempt=${attempt}`;
      link.textContent = number;
      link.title = "show in the log";
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        show(Number(place));
      });
      out.append(link, ":");
    } else if (number) out.append(`${number}:`);
    out.append(marked(body, 50), "\n");
    return out;
  }

  async function findAll() {
    looked = word.value;
    found.hidden = !looked;
    if (!looked) return;
    const head = Object.assign(document.createElement("p"), { className: "faint", textContent: "searching…" });
    found.replaceChildren(head);
    const answer = await get(`?find=${encodeURIComponent(looked)}&tail=200`);
    if (!found.contains(head)) return; // another search has begun since, or the word has changed
    const seen = answer && answer.told("Cut") === null ? "the whole log" : "the end of the log (its beginning was not searched)";
    head.textContent = !answer ? "cannot search the log" : answer.text ? `the last lines with “${looked}” in ${seen}:` : `“${looked}” was not found in ${seen}`;
    if (!answer || !answer.text) return;
    const pre = Object.assign(document.createElement("pre"), { className: "log wrap", tabIndex: 0 });
    const lines = answer.text.split("\n").slice(0, -1);
    const places = (answer.told("Places") || "").split(",");
    for (const [number, text] of lines.entries()) pre.append(line(text, places[number - lines.length + places.length]));
    found.append(pre);
  }

  follow.addEventListener("change", () => { if (follow.checked) last(); });
  view.addEventListener("wheel", (event) => { if (event.deltaY < 0) follow.checked = false; }, { passive: true });
  view.addEventListener("scroll", () => { if (running() && atEnd() && !away && here < 0) follow.checked = true; });
  wrap.addEventListener("change", () => view.classList.toggle("wrap", wrap.checked));
  word.addEventListener("input", typed);
  word.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); go(here - 1); } });
  at("log-before").addEventListener("click", () => go(here - 1));
  at("log-find").addEventListener("submit", (event) => { event.preventDefault(); if (marks.length) go(here + 1); else findAll(); });
  at("log-all").addEventListener("click", findAll);
  at("log-earlier").addEventListener("click", earlier);
  at("log-end").addEventListener("click", () => { last(); view.focus(); });
  document.addEventListener("gpujob:changed", read);
  setInterval(() => { if (running()) read(); }, LOOK_MS);
  read();

  async function last() {
    if (away) {
      end = null;
      away = false;
      await alone(readOn);
    }
    toEnd();
  }
})();
