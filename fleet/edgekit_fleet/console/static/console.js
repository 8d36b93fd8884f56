// What the pages do besides htmx: a word for the state of live updates. Everything works without this file.
"use strict";

const word = document.getElementById("live-word");
const box = document.getElementById("live");

function show(state, text) {
  box.dataset.state = state;
  if (word.textContent !== text) word.textContent = text;
}

if (box) {
  box.addEventListener("htmx:sse:after:connection", () => show("live", "Live"));
  box.addEventListener("htmx:sse:error", () => show("lost", "Reconnecting"));
  // The last two: the first connection failed, and htmx tries it only once.
  for (const end of ["htmx:sse:close", "htmx:error"])
    box.addEventListener(end, () => show("lost", "Not live: reload the page"));
  // Of any part of the page: a login that has ended leads nowhere by itself, since a form may be filled in.
  document.addEventListener("htmx:response:error", () => show("lost", "Not live: reload the page"));
}

// A form with files: it is told before the upload if they are too large, and is sent once.
for (const form of document.querySelectorAll("form[data-busy]")) {
  const files = form.querySelector("input[type=file]");
  files.addEventListener("change", () => {
    const size = [...files.files].reduce((sum, file) => sum + file.size, 0);
    files.setCustomValidity(size > files.dataset.mostBytes ? "These files are too large together." : "");
  });
  form.addEventListener("submit", () => {
    const button = form.querySelector("button");
    button.textContent = form.dataset.busy;
    button.disabled = true;
  });
}
