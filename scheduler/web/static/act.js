// Buttons and forms that change something: each posts JSON to the API and shows the result.
"use strict";
(() => {
  document.documentElement.classList.add("js");
  const said = document.getElementById("said");
  const wrong = document.getElementById("wrong");
  const SAID_MS = 6000;
  let fading = 0;

  /** Show a message for SAID_MS; an error is shown four times as long. */
  function say(text, bad = false) {
    clearTimeout(fading);
    said.textContent = bad ? "" : text;
    wrong.textContent = bad ? text : "";
    fading = setTimeout(() => { said.textContent = ""; wrong.textContent = ""; }, bad ? 4 * SAID_MS : SAID_MS);
  }

  /** POST a JSON value and return {ok, status, body, said}; status 0 if there is no answer. Never throws. */
  async function post(path, value) {
    try {
      const answer = await fetch(path, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Gpujob": "1" },
        body: JSON.stringify(value),
        credentials: "same-origin",
      });
      const body = await answer.json().catch(() => ({}));
      const said = decodeURIComponent(answer.headers.get("X-Gpujob-Said") || "");
      return { ok: answer.ok, status: answer.status, body, said };
    } catch {
      return { ok: false, status: 0, body: { error: "no connection to gpujob web. Is it still running, and is the tunnel open?" } };
    }
  }

  function problem(answer) {
    if (answer.status === 401) return "You are signed out; reload the page and sign in.";
    return answer.body.error || `The request failed (${answer.status}).`;
  }

  /** Return the server's sentence about what was done, with a capital letter and a full stop. */
  function told(said) {
    const text = said || "Done";
    return `${text[0].toUpperCase()}${text.slice(1)}.`;
  }

  /** Ask the user to confirm an action that cannot be undone; resolves to the decision. */
  function sure(text) {
    const dialog = document.getElementById("ask");
    document.getElementById("ask-text").textContent = text;
    const from = document.activeElement;
    return new Promise((resolve) => {
      dialog.returnValue = "no";
      dialog.addEventListener("close", () => {
        (from?.isConnected ? from : document.querySelector(`[data-key="${CSS.escape(from?.dataset.key ?? "")}"]`) ?? document.getElementById("main")).focus();
        resolve(dialog.returnValue === "yes");
      }, { once: true });
      dialog.showModal();
    });
  }

  async function act(control, path, value) {
    if (control.getAttribute("aria-busy") === "true") return;
    if (control.dataset.ask && !(await sure(control.dataset.ask))) return;
    control.setAttribute("aria-busy", "true");
    const answer = await post(path, value);
    control.removeAttribute("aria-busy");
    say(answer.ok ? told(answer.said) : problem(answer), !answer.ok);
    document.dispatchEvent(new Event("gpujob:look"));
  }

  document.addEventListener("click", (event) => {
    const control = event.target instanceof Element && event.target.closest("[data-post]");
    if (control) act(control, control.dataset.post, JSON.parse(control.dataset.body ?? "{}"));
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!(form instanceof HTMLFormElement) || !form.dataset.postForm) return;
    event.preventDefault();
    const value = {};
    for (const input of form.querySelectorAll("input[name]")) {
      value[input.name] = "number" in input.dataset ? Number(input.value) : input.value;
    }
    act(form.querySelector("button"), form.dataset.postForm, value).then(() => form.querySelector("input")?.blur());
  });

  window.gpujob = { post, problem, say };
})();
