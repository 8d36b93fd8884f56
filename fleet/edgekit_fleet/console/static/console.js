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
  box.addEventListener("htmx:sse:close", () => show("lost", "Not live: reload the page"));
}
