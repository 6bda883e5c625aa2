// Keeps a page up to date: fetches it again after each event, and changes only the elements that differ.
"use strict";
(() => {
  const LEAST_MS = 1000; // least average time between two fetches
  const LEAST_TIMES = 4; // least average time between two fetches, in durations of the last fetch: spares a slow server
  const MOST_AT_ONCE = 2; // fetches in quick succession after a quiet time
  const EVERY_MS = 10000; // fetch also without events: for new readings, and while there is no event stream
  const MOST_MS = 30000; // time limit of a fetch
  const LATER_MS = 1300; // after the last event, before the page is fetched once more: predictions are up to 1 s old
  const SOON_S = 60; // a time that is nearer is shown in seconds from now
  const AGAIN_MS = 3000; // before a lost event stream is opened again
  const line = document.getElementById("live");
  const shift = Date.now() / 1000 - Number(document.documentElement.dataset.now); // difference of the clocks in seconds
  const last = new Map(); // id of a region → its HTML in the last fetched page
  let stream = null;
  let saved = MOST_AT_ONCE; // fetches that are allowed now
  let counted = Date.now();
  let waiting = 0;
  let looking = false;
  let took = 0;
  let again = 0;
  let later = 0;
  let seenAt = document.documentElement.dataset.clock; // server's time of the shown data
  let stale = false;

  function tell(text, on) {
    if (line.textContent !== text) line.textContent = text;
    line.classList.toggle("up", on);
    line.classList.toggle("down", !on && text !== "");
  }

  /** Mark the page as up to date, or as stale: then times stop, the regions are dimmed and a banner shows `why`. */
  function fresh(now, why = "") {
    if (now) {
      document.getElementById("stale")?.remove();
    } else {
      const banner = document.getElementById("stale") ?? document.createElement("p");
      const text = `✗ Not live; the data is from ${seenAt}: ${why}`;
      if (!banner.isConnected) {
        Object.assign(banner, { id: "stale", className: "banner bad" });
        banner.setAttribute("role", "alert");
        document.getElementById("main").before(banner);
      }
      if (banner.textContent !== text) banner.textContent = text;
      tell("not live", false);
    }
    stale = !now;
    document.documentElement.classList.toggle("stale", stale);
  }

  // -- updating the page -------------------------------------------------------------------------------

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || "" : "");
  const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

  /** Change `old` into `fresh`; keep the reader's focus, typed text, opened details and scroll position. */
  function become(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== 1) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open" && name !== "aria-busy") old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (name === "open" || old.getAttribute(name) === value) continue;
      old.setAttribute(name, value);
    }
    const known = new Map();
    for (const child of old.childNodes) if (keyOf(child)) known.set(keyOf(child), child);
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      const same = keyOf(wanted) ? known.get(keyOf(wanted)) : at && alike(at, wanted) ? at : null;
      if (same && same.nodeName === wanted.nodeName) {
        if (same === at) at = at.nextSibling;
        else old.insertBefore(same, at);
        become(same, wanted);
      } else {
        old.insertBefore(document.importNode(wanted, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  /** Describe the focused element for `backTo`, which runs after an update; null if no element has the focus. */
  function placeOf(focused) {
    if (!focused || focused === document.body) return null;
    const key = focused.id || focused.dataset.key;
    const group = focused.closest(".buttons, .act");
    const holder = (group ?? focused.parentElement)?.closest("[data-key], [id]");
    const job = /^\/(?:api\/)?jobs\/(\d+)/.exec(focused.dataset.post ?? focused.getAttribute("href") ?? "")?.[1];
    return { key, holder: holder && keyOf(holder), at: group ? [...group.querySelectorAll("button")].indexOf(focused) : -1, job };
  }

  /** Focus the element again; if it is gone, a button in its place, a link to its job, or the content. */
  function backTo({ key, holder, at, job }) {
    const named = (text) => text && document.querySelector(`[data-key="${CSS.escape(text)}"], [id="${CSS.escape(text)}"]`);
    const buttons = [...(named(holder)?.querySelectorAll(".buttons button") ?? [])];
    const found = named(key) || (at >= 0 && buttons[at]) || (job && document.querySelector(`main a[href="/jobs/${job}"]`)) || buttons[0]
      || document.getElementById("main");
    found.focus({ preventScroll: true });
  }

  function take(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    seenAt = page.documentElement.dataset.clock ?? seenAt;
    const place = placeOf(document.activeElement);
    for (const region of document.querySelectorAll("[data-live]")) {
      const now = page.getElementById(region.id);
      if (!now || last.get(region.id) === now.outerHTML) continue;
      last.set(region.id, now.outerHTML);
      const typing = region.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
      if (!typing) become(region, now);
      else last.delete(region.id); // update the region after the next fetch
    }
    if (page.title && document.title !== page.title) document.title = page.title;
    if (place && document.activeElement === document.body) backTo(place);
    document.dispatchEvent(new Event("gpujob:changed"));
    tick();
  }

  /** Return the message of an error page, as the end of a sentence; empty if there is none. */
  function said(text) {
    const found = new DOMParser().parseFromString(text, "text/html").querySelector("main .banner")?.textContent.trim();
    return found ? `, ${found}` : "";
  }

  async function look() {
    if (looking) return void (waiting ||= setTimeout(soon, LEAST_MS / 4));
    looking = true;
    const begun = Date.now();
    saved -= 1;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(MOST_MS) });
      const text = await answer.text();
      if (answer.status === 401) fresh(false, "you are signed out; reload the page and sign in");
      else if (answer.ok || answer.status === 404) {
        take(text);
        fresh(true);
        if (stream && stream.readyState === EventSource.OPEN) tell("live", true);
        else if (!stream || stream.readyState === EventSource.CLOSED) tell("not live: updated every 10 s", false);
      } else fresh(false, `the server answers with error ${answer.status}${said(text)}`);
    } catch (error) {
      if (error.name === "TimeoutError") fresh(false, "gpujob web did not answer within 30 s");
      else fresh(false, "no connection to gpujob web. Is it still running, and is the tunnel open?");
    }
    looking = false;
    took = Date.now() - begun;
  }

  /** Fetch the page now, or as soon as the rate limit allows it. */
  function soon() {
    clearTimeout(waiting);
    waiting = 0;
    if (document.hidden) return;
    const each = Math.max(LEAST_MS, LEAST_TIMES * took);
    saved = Math.min(MOST_AT_ONCE, saved + (Date.now() - counted) / each);
    counted = Date.now();
    if (saved >= 1) look();
    else waiting = setTimeout(soon, (1 - saved) * each + 5);
  }

  // -- events ------------------------------------------------------------------------------------------

  function listen() {
    clearTimeout(again);
    if (stream || document.hidden || !document.querySelector("[data-live]")) return;
    stream = new EventSource("/api/events");
    stream.onopen = () => { tell("live", true); soon(); };
    stream.onerror = () => {
      soon(); // shows whether the server still answers
      if (stream && stream.readyState === EventSource.CLOSED) {
        stream = null;
        again = setTimeout(listen, AGAIN_MS);
      }
    };
    for (const kind of ["job", "gpus", "queue", "scheduler", "again"]) {
      stream.addEventListener(kind, (event) => {
        soon();
        clearTimeout(later);
        later = setTimeout(soon, LATER_MS);
        document.dispatchEvent(new CustomEvent("gpujob:event", { detail: { kind, data: event.data } }));
      });
    }
  }

  /** Close the stream of a hidden page: browsers allow six connections to a server, and each tab would use one. */
  function turn() {
    if (document.hidden) {
      stream?.close();
      stream = null;
      clearTimeout(again);
    } else {
      listen();
      soon();
    }
  }

  // -- running times -----------------------------------------------------------------------------------

  const two = (number) => String(number).padStart(2, "0");
  function span(seconds) {
    const s = Math.max(0, Math.floor(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  /** Return a time that is near, as the server's pages show it; null for a time that is shown as time of day. */
  function near(left) {
    if (left >= SOON_S) return null;
    return left < 1 ? "now" : `in ${Math.round(left)} s`;
  }

  function tick() {
    if (stale) return;
    const now = Date.now() / 1000 - shift;
    for (const one of document.querySelectorAll("[data-until]")) {
      const text = near(Number(one.dataset.until) - now);
      if (text !== null && one.textContent !== text) one.textContent = text;
    }
    for (const one of document.querySelectorAll("[data-since]")) {
      const text = span(now - Number(one.dataset.since));
      if (one.textContent !== text) one.textContent = text;
    }
  }

  for (const region of document.querySelectorAll("[data-live]")) last.set(region.id, region.outerHTML);
  // Show the newest part.
  for (const frame of document.querySelectorAll(".scroll:has(svg)")) frame.scrollLeft = frame.scrollWidth;
  document.addEventListener("visibilitychange", turn);
  document.addEventListener("gpujob:look", soon);
  setInterval(() => { if (!document.hidden) tick(); }, 1000);
  setInterval(() => { if (!document.hidden && document.querySelector("[data-live]")) soon(); }, EVERY_MS);
  listen();
})();
