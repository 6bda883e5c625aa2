// The form for a new job: splits the command as a shell would, and shows a preview before the job is submitted.
"use strict";
(() => {
  const form = document.getElementById("submit");
  const chips = document.getElementById("f-words");
  const preview = document.getElementById("preview");
  const says = document.getElementById("submit-says");
  const env = document.getElementById("env");
  const WAIT_MS = 300;
  const NOT_CLOSED = "a quote is not closed";
  const OF_A_SHELL = /^(?:\||\|\||&|&&|;|[12&]?>{1,2}[^\s>]*|<{1,2})$|^\$/; // words that only a shell interprets
  const FAILS = /would fail immediately/; // the notes of a preview that are warnings
  const hint = chips.firstElementChild;
  const shift = Date.now() / 1000 - Number(document.documentElement.dataset.now); // difference of the clocks in seconds
  let waiting = 0;
  let asked = 0;

  /** Split a text into words as a shell does, by blanks, quotes and backslashes; null if a quote is not closed. */
  function words(text) {
    const out = [];
    let word = null;
    let quote = "";
    for (let at = 0; at < text.length; at += 1) {
      const char = text[at];
      if (quote === "'") {
        if (char === "'") quote = "";
        else word += char;
      } else if (quote === '"') {
        if (char === '"') quote = "";
        else if (char === "\\" && '"\\$`\n'.includes(text[at + 1] ?? "x")) word += text[at += 1];
        else word += char;
      } else if (/\s/.test(char)) {
        if (word !== null) out.push(word);
        word = null;
      } else {
        word ??= "";
        if (char === "'" || char === '"') quote = char;
        else if (char === "\\") {
          if (at + 1 >= text.length) return null;
          word += text[at += 1];
        } else word += char;
      }
    }
    if (quote) return null;
    if (word !== null) out.push(word);
    return out;
  }

  function variables() {
    return [...env.querySelectorAll(".env-row")].map((row) => [...row.querySelectorAll("input")].map((one) => one.value));
  }

  /** Return why the form cannot be sent; empty if it can. */
  function trouble() {
    const command = words(form.command.value);
    if (command === null) return NOT_CLOSED;
    if (!command.length) return "enter a command";
    const nameless = variables().find(([name, text]) => !name.trim() && text);
    return nameless ? `the variable with the value ${nameless[1]} has no name` : "";
  }

  /** Return the form as the body of a request to the API; null if it cannot be sent. */
  function value() {
    if (trouble()) return null;
    const out = { command: words(form.command.value) };
    for (const field of form.querySelectorAll("[data-option]")) {
      const text = field.value.trim();
      if (text) out[field.name] = field.type === "number" ? Number(text) : text;
    }
    const set = variables().filter(([name]) => name.trim());
    if (set.length) out.env = Object.fromEntries(set.map(([name, text]) => [name.trim(), text]));
    return out;
  }

  function drawWords() {
    const found = words(form.command.value);
    chips.replaceChildren();
    if (found === null) chips.append(NOT_CLOSED);
    else if (!found.length) chips.append(hint);
    else {
      for (const word of found) {
        const chip = document.createElement("b");
        chip.textContent = word === "" ? "“”" : word;
        chips.append(chip, " ");
      }
    }
  }

  function tell(kind, ...lines) {
    preview.className = `preview wide ${kind}`;
    preview.replaceChildren(...lines.filter(Boolean).map((text, place) => {
      const one = document.createElement("p");
      one.textContent = text;
      if (text.startsWith("! ")) one.className = "warning";
      else if (place) one.className = "faint";
      return one;
    }));
  }

  /** Quote a word for a shell, if necessary. */
  const quoted = (word) => (/^[\w@%+=:,./{}-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

  /** Return a warning about words that only a shell interprets, because no shell reads the command. */
  function hints(command) {
    if (command[1] === "-c") return [];
    const odd = [...new Set(command.filter((word) => OF_A_SHELL.test(word)))];
    if (!odd.length) return [];
    const many = odd.length > 1 ? "are passed to the program as words" : "is passed to the program as a word";
    return [`! ${odd.join("  ")} ${many}, because no shell is used (to use one: sh -c "…")`];
  }

  /** Return a predicted time as "in 12 min (8 min to 25 min)", from the server's present time. */
  function within(likely, earliest, latest) {
    const left = (time) => Math.max(0, Date.parse(time) / 1000 - (Date.now() / 1000 - shift));
    const [about, least, most] = [left(likely), left(earliest), latest === null ? null : left(latest)].map((one) => (one === null ? "open" : length(one)));
    return least === most ? `in ${about}` : `in about ${about} (${least} to ${most})`;
  }

  function length(seconds) {
    if (seconds < 60) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 24 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }

  /** Return the lines about the expected start and end. */
  function times(would, one) {
    if (!one || would === "never") return [];
    const start = would === "start" ? "" : one.start === null ? "expected start: not known" : `expected start: ${within(one.start, one.start_earliest, one.start_latest)}`;
    const end = one.end === null ? "" : `expected end: ${within(one.end, one.end_earliest, one.end_latest)}`;
    const run = one.run_s === null ? "" : `expected run time: ${length(one.run_s)} (${one.source})`;
    return [start, end, run];
  }

  async function ask() {
    const number = (asked += 1);
    const wanted = value();
    if (!wanted) {
      const empty = !form.command.value.trim();
      tell(empty ? "" : "never", empty ? "Enter a command to see here what would happen." : `✗ Cannot submit: ${trouble()}`);
      return;
    }
    const answer = await window.gpujob.post("/api/preview", wanted);
    if (number !== asked) return; // the form has changed since this request
    if (!answer.ok) {
      tell("never", `✗ Cannot submit: ${window.gpujob.problem(answer)}`);
      return;
    }
    const { would, gpus, reason, need, notes, command, expected } = answer.body;
    const bad = [...(notes || []).filter((note) => FAILS.test(note)).map((note) => `! ${note}`), ...hints(wanted.command)];
    const where = gpus && gpus.length ? ` on GPU ${gpus.join(", ")}` : "";
    const heads = {
      start: bad.length ? `It would start immediately${where}, but:` : `✓ It would start immediately${where}.`,
      wait: `○ It would wait: ${reason}`,
      never: `✗ It could never run: ${reason}`,
    };
    const needs = need === undefined || need === null ? "" : `it needs ${need || "no"} GPU${need > 1 ? "s" : ""}`;
    const runs = command.length ? `runs: ${command.map(quoted).join(" ")}` : "";
    tell(bad.length && would === "start" ? "wait" : would, heads[would], ...bad, ...times(would, expected), needs, runs, ...(notes || []).filter((note) => !FAILS.test(note)));
  }

  function changed() {
    drawWords();
    says.textContent = "";
    clearTimeout(waiting);
    waiting = setTimeout(ask, WAIT_MS);
  }

  function addVariable() {
    const row = document.createElement("div");
    row.className = "env-row";
    for (const [what, label] of [["NAME", "name of a variable"], ["value", "its value"]]) {
      const input = document.createElement("input");
      input.placeholder = what;
      input.setAttribute("aria-label", label);
      input.spellcheck = false;
      row.append(input);
    }
    const away = document.createElement("button");
    away.type = "button";
    away.textContent = "remove";
    away.addEventListener("click", () => { row.remove(); changed(); document.getElementById("env-more").focus(); });
    row.append(away);
    env.append(row);
    row.querySelector("input").focus();
  }

  form.addEventListener("input", changed);
  document.addEventListener("gpujob:event", () => { if (value()) { clearTimeout(waiting); waiting = setTimeout(ask, WAIT_MS); } });
  document.getElementById("env-more").addEventListener("click", addVariable);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const wanted = value();
    if (!wanted) {
      says.textContent = `Cannot submit: ${trouble()}`;
      return;
    }
    const button = form.querySelector("button.main");
    button.disabled = true;
    const answer = await window.gpujob.post("/api/jobs", wanted);
    button.disabled = false;
    if (answer.ok) location.assign(`/jobs/${answer.body.id}`);
    else says.textContent = window.gpujob.problem(answer);
  });
  if (form.command.value) changed();
})();
