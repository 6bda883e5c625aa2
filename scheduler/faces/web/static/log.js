// The log of a job: follows what is written, searches in what is shown and in the whole file.
"use strict";
(() => {
  const view = document.getElementById("log");
  const follow = document.getElementById("log-follow");
  const wrap = document.getElementById("log-wrap");
  const word = document.getElementById("log-word");
  const says = document.getElementById("log-says");
  const found = document.getElementById("log-found");
  const none = document.getElementById("log-none");
  const address = view.dataset.log;
  const LOOK_MS = 1000;
  const FIRST_LINES = 1000;
  const MOST_SHOWN = 2000000; // characters: a browser should stay quick
  const rest = document.createElement("span"); // the beginning of a line that has no end yet
  let text = "";
  let loose = "";
  let end = null; // byte up to which the log is shown; null: not begun
  let attempt = "";
  let reading = false;
  let cut = false;
  let searched = 0;
  let loosely = 0;

  const atEnd = () => view.scrollHeight - view.scrollTop - view.clientHeight < 40;
  const toEnd = () => { view.scrollTop = view.scrollHeight; };
  const running = () => ["starting", "running", "stopping", "pending"].includes(document.getElementById("job-head").dataset.state);

  /** `piece` as text, with what is searched for marked. Nothing in it is ever read as HTML. */
  function marked(piece) {
    const out = document.createDocumentFragment();
    const wanted = word.value.toLowerCase();
    if (!wanted) {
      out.append(piece);
      return [out, 0];
    }
    const low = piece.toLowerCase();
    let at = 0;
    let number = 0;
    for (let next = low.indexOf(wanted); next >= 0; next = low.indexOf(wanted, at)) {
      const mark = document.createElement("mark");
      mark.textContent = piece.slice(next, next + wanted.length);
      out.append(piece.slice(at, next), mark);
      at = next + wanted.length;
      number += 1;
    }
    out.append(piece.slice(at));
    return [out, number];
  }

  function tell() {
    const parts = [];
    if (word.value) parts.push(searched + loosely ? `${searched + loosely} shown` : "not in what is shown");
    if (cut) parts.push("the beginning is not shown");
    says.textContent = parts.join("; ");
  }

  function redraw() {
    const [part, number] = marked(text);
    const [ending, more] = marked(loose);
    rest.replaceChildren(ending);
    view.replaceChildren(part, rest);
    searched = number;
    loosely = more;
    none.hidden = text + loose !== "";
    tell();
  }

  /** Show what came: `whole` lines, and the `open` beginning of one, which comes again. */
  function add(whole, open) {
    if (!whole && open === loose) return;
    const stay = !follow.checked;
    loose = open;
    text += whole;
    if (text.length > MOST_SHOWN) {
      text = text.slice(text.indexOf("\n", text.length - MOST_SHOWN / 2) + 1);
      cut = true;
      redraw();
    } else {
      const [part, number] = marked(whole);
      const [ending, more] = marked(open);
      rest.before(part);
      rest.replaceChildren(ending);
      searched += number;
      loosely = more;
      none.hidden = text + loose !== "";
      tell();
    }
    if (!stay) toEnd();
  }

  /** Where the last `number` characters begin; one beyond 16 bits counts as one. */
  function before(piece, number) {
    let at = piece.length;
    for (let left = number; left > 0 && at > 0; left -= 1) {
      at -= 1;
      if (at > 0 && piece.charCodeAt(at) >= 0xdc00 && piece.charCodeAt(at) < 0xe000) at -= 1;
    }
    return at;
  }

  async function read() {
    if (reading || document.hidden) return;
    reading = true;
    try {
      const from = end === null ? `?tail=${FIRST_LINES}` : `?from=${end}`;
      const answer = await fetch(address + from, { credentials: "same-origin" });
      if (answer.ok) {
        const piece = await answer.text();
        const told = (name) => answer.headers.get(`X-Gpujob-Log-${name}`);
        const place = before(piece, Number(told("Unfinished") || 0));
        const which = told("Attempt") ?? attempt;
        const anew = told("Restarted") !== null || which !== attempt;
        if (end === null || anew) {
          text = loose = "";
          cut = false;
          redraw();
        }
        if (end !== null && anew && told("Restarted") === null) end = null; // another attempt: all of its log
        else {
          add(piece.slice(0, place), piece.slice(place));
          end = Number(told("End") ?? 0);
        }
        attempt = which;
      }
    } catch {
      says.textContent = "the log could not be read; trying again";
    }
    reading = false;
  }

  async function findAll(event) {
    event.preventDefault();
    found.hidden = false;
    found.replaceChildren();
    if (!word.value) {
      found.hidden = true;
      return;
    }
    const head = document.createElement("p");
    head.className = "faint";
    head.textContent = "looking…";
    found.append(head);
    const answer = await fetch(`${address}?find=${encodeURIComponent(word.value)}&tail=200`, { credentials: "same-origin" }).catch(() => null);
    if (!answer || !answer.ok) {
      head.textContent = "the log could not be searched";
      return;
    }
    const lines = await answer.text();
    head.textContent = lines ? `the last lines with “${word.value}” in the whole log:` : `“${word.value}” is nowhere in the log`;
    if (!lines) return;
    const pre = document.createElement("pre");
    pre.className = "log wrap";
    pre.tabIndex = 0;
    pre.append(marked(lines)[0]);
    found.append(pre);
  }

  follow.addEventListener("change", () => { if (follow.checked) toEnd(); });
  view.addEventListener("wheel", (event) => { if (event.deltaY < 0) follow.checked = false; }, { passive: true });
  view.addEventListener("scroll", () => { if (running() && atEnd()) follow.checked = true; });
  wrap.addEventListener("change", () => view.classList.toggle("wrap", wrap.checked));
  word.addEventListener("input", redraw);
  document.getElementById("log-find").addEventListener("submit", findAll);
  document.getElementById("log-end").addEventListener("click", () => { toEnd(); view.focus(); });
  document.addEventListener("gpujob:changed", read);
  setInterval(() => { if (running()) read(); }, LOOK_MS);
  read();
})();
