// The form for a new job: splits the command as a shell would, and shows what would happen before it does.
"use strict";
(() => {
  const form = document.getElementById("submit");
  const chips = document.getElementById("f-words");
  const preview = document.getElementById("preview");
  const says = document.getElementById("submit-says");
  const env = document.getElementById("env");
  const WAIT_MS = 300;
  const hint = chips.firstElementChild;
  let waiting = 0;
  let asked = 0;

  /** Words as a shell splits them by blanks, quotes and backslashes; null with a quote that is left open. */
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

  /** What the form says, as the API takes it; null while the command is not whole. */
  function value() {
    const command = words(form.command.value);
    if (!command || !command.length) return null;
    const out = { command };
    for (const name of ["gpus", "allowed", "label", "after", "time", "cwd"]) {
      const text = form.elements[name].value.trim();
      if (text) out[name] = text;
    }
    for (const name of ["priority", "retries"]) {
      if (form.elements[name].value !== "") out[name] = Number(form.elements[name].value);
    }
    const pairs = [...env.querySelectorAll(".env-row")].map((row) => [...row.querySelectorAll("input")].map((one) => one.value));
    const set = pairs.filter(([name]) => name.trim());
    if (set.length) out.env = Object.fromEntries(set.map(([name, text]) => [name.trim(), text]));
    return out;
  }

  function drawWords() {
    const found = words(form.command.value);
    chips.replaceChildren();
    if (found === null) chips.append("a quote is not closed");
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
      if (place) one.className = "faint";
      return one;
    }));
  }

  async function ask() {
    const number = (asked += 1);
    const wanted = value();
    if (!wanted) {
      tell("", "Write a command, and here stands what would happen.");
      return;
    }
    const answer = await window.gpujob.post("/api/preview", wanted);
    if (number !== asked) return; // something else was typed meanwhile
    if (!answer.ok) {
      tell("never", `✗ Not like this: ${window.gpujob.problem(answer)}`);
      return;
    }
    const { would, gpus, reason, need, notes, command } = answer.body;
    const heads = {
      start: `✓ It would start at once${gpus && gpus.length ? ` on GPU ${gpus.join(", ")}` : ""}.`,
      wait: `○ It would wait: ${reason}`,
      never: `✗ It could never run: ${reason}`,
    };
    const needs = need === undefined || need === null ? "" : `it needs ${need}`;
    tell(would, heads[would], needs, command ? `runs: ${command.join(" ")}` : "", ...(notes || []));
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
      says.textContent = "the command is not whole";
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
