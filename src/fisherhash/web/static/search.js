// Drop, paste or choose an image; sliders that answer while they are dragged; arrow keys in the grid.
const layout = document.querySelector(".layout");
const form = document.querySelector(".drop");
const controls = document.querySelector(".controls");
const results = document.querySelector("#results");
const problem = form.querySelector(".error");

function say(sentence) {
  problem.textContent = sentence;
  problem.hidden = !sentence;
}

async function search(file) {
  const most = Number(layout.dataset.most);
  if (file.size > most) {
    say(`This file is larger than ${Math.floor(most / 1048576)} MB, the limit of this server.`);
    return;
  }
  say("");
  form.classList.add("busy");
  try {
    const answer = await fetch(form.action, {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream", Accept: "application/json" },
    });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    location.assign(found.url);
  } catch (error) {
    say(error instanceof TypeError ? "The server does not answer." : error.message);
  } finally {
    form.classList.remove("busy");
  }
}

form.querySelector("input[type=file]").addEventListener("change", (event) => {
  if (event.target.files.length) search(event.target.files[0]);
  event.target.value = "";
});

document.addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])][0];
  if (file) {
    event.preventDefault();
    search(file);
  }
});

const veil = document.querySelector(".veil");
let inside = 0;
document.addEventListener("dragenter", (event) => {
  if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
  inside += 1;
  veil.hidden = false;
});
document.addEventListener("dragleave", () => {
  inside = Math.max(0, inside - 1);
  if (!inside) veil.hidden = true;
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  inside = 0;
  veil.hidden = true;
  const file = event.dataTransfer?.files?.[0];
  if (file) search(file);
});

// Sliders. One request at a time; the last position always gets its answer.
const radius = controls.querySelector("#radius");
const count = controls.querySelector("#k");
const distances = document.querySelector(".distances");

function bits(number) {
  return `${number} bit${number === 1 ? "" : "s"}`;
}

function params() {
  const chosen = new URLSearchParams();
  for (const [name, value] of new FormData(controls)) {
    if (name === "radius" && value === radius?.dataset.any) continue;
    if (name === "k" && value === count.dataset.usual) continue;
    chosen.append(name, value);
  }
  return chosen.toString();
}

function label() {
  controls.querySelector("output[for=k]").textContent = count.value;
  if (!radius) return;
  const any = radius.value === radius.dataset.any;
  const drawing = distances.querySelector("svg");
  let said = any ? "any" : `up to ${bits(Number(radius.value))}`;
  if (drawing) {
    const counts = drawing.dataset.counts.split(",").map(Number);
    const near = counts.slice(0, Number(radius.value) + 1).reduce((a, b) => a + b, 0);
    if (!any) said += `: ${near.toLocaleString("en")}`;
    for (const bar of drawing.querySelectorAll("rect")) {
      bar.classList.toggle("out", Number(bar.dataset.distance) > Number(radius.value));
    }
  }
  controls.querySelector("output[for=radius]").textContent = said;
}

let running = false;
let wanted = null;

async function refresh() {
  wanted = params();
  if (running) return;
  running = true;
  while (wanted !== null) {
    const now = wanted;
    wanted = null;
    try {
      const answer = await fetch(`/results?${now}`, { headers: { Accept: "text/html" } });
      const text = await answer.text();
      if (answer.ok) {
        results.innerHTML = text;
        history.replaceState(null, "", now ? `/?${now}` : "/");
      }
    } catch {
      say("The server does not answer.");
    }
  }
  running = false;
}

controls.addEventListener("input", () => {
  label();
  refresh();
});
controls.addEventListener("submit", (event) => event.preventDefault());

async function draw() {
  if (!distances) return;
  try {
    const answer = await fetch(distances.dataset.source, { headers: { Accept: "text/html" } });
    if (answer.ok) distances.innerHTML = await answer.text();
  } catch {
    return;
  }
  label();
}

// A browser may put back old positions of the sliders; the address is what counts.
controls.reset();
label();
draw();

// On a phone the results come before the filters are read.
if (matchMedia("(max-width: 760px)").matches) {
  for (const filter of document.querySelectorAll(".filter")) filter.open = false;
}

// Arrow keys move between results.
results.addEventListener("keydown", (event) => {
  const frames = [...results.querySelectorAll(".frame")];
  const at = frames.indexOf(document.activeElement);
  if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const top = frames[0].getBoundingClientRect().top;
  const row = frames.filter((frame) => Math.abs(frame.getBoundingClientRect().top - top) < 2).length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
  const next = step && frames[at + step];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});
