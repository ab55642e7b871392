// The threshold regroups at once; images side by side; how many are marked.
const slider = document.querySelector("#radius");
const code = slider.form.elements.code.value;
const groups = document.querySelector("#groups");
const review = document.querySelector(".review");
const bar = document.querySelector(".export");
const marked = document.querySelector(".marked");
const dialog = document.querySelector(".beside");

function count() {
  const all = review.querySelectorAll("[name=remove]:checked").length;
  const every = review.querySelector("[name=every]")?.checked;
  marked.textContent = `${all} image${all === 1 ? " is" : "s are"} marked`;
  for (const button of bar.querySelectorAll("[name=format]")) button.disabled = !all && !every;
}

function say(number) {
  document.querySelector("output[for=radius]").textContent = `${number} bit${number === 1 ? "" : "s"}`;
}

// What the server chose, where nobody has moved the slider.
function prepare() {
  const found = groups.querySelector("[data-radius]");
  if (found) slider.max = found.dataset.most;
  if (found && slider.disabled) {
    slider.value = found.dataset.radius;
    slider.disabled = slider.form.hidden = false;
    say(Number(slider.value));
  }
  bar.hidden = !groups.querySelector(".group");
  for (const buttons of review.querySelectorAll(".choices")) buttons.hidden = false;
  bar.querySelector(".worse").hidden = !groups.querySelector(".group.sure");
  count();
}

let running = false;
let wanted = null;

function address() {
  return slider.disabled ? `code=${code}` : `code=${code}&radius=${slider.value}`;
}

async function refresh() {
  wanted = address();
  if (running) return;
  running = true;
  while (wanted !== null) {
    const now = wanted;
    wanted = null;
    let answer = null;
    try {
      answer = await fetch(`/duplicates/groups?${now}`, { headers: { Accept: "text/html" } });
    } catch {
      groups.querySelector(".total").textContent = "The server does not answer.";
    }
    if (!answer?.ok) break;
    groups.innerHTML = await answer.text();
    history.replaceState(null, "", `/duplicates?${now}`);
    review.action = `/duplicates/export?${now}`;
    prepare();
    const again = groups.querySelector("[data-again]");
    if (again) {
      await new Promise((done) => setTimeout(done, 1000 * Number(again.dataset.again)));
      wanted ??= address();
    }
  }
  running = false;
}

slider.addEventListener("input", () => {
  say(Number(slider.value));
  refresh();
});
slider.form.addEventListener("submit", (event) => event.preventDefault());
groups.addEventListener("change", count);

// Nothing is marked until somebody asks for it.
review.addEventListener("click", (event) => {
  if (!event.target.classList.contains("worse")) return;
  const group = event.target.closest(".group");
  for (const place of group ? [group] : groups.querySelectorAll(".group.sure")) {
    for (const box of place.querySelectorAll("[name=remove]")) box.checked = "worse" in box.dataset;
  }
  count();
});

groups.addEventListener("click", (event) => {
  if (!event.target.classList.contains("compare")) return;
  const images = dialog.querySelector(".images");
  images.replaceChildren();
  for (const copy of event.target.closest(".group").querySelectorAll(".copy")) {
    const figure = document.createElement("figure");
    const image = document.createElement("img");
    image.src = copy.querySelector("img").getAttribute("src").replace("/medium", "/large");
    image.alt = copy.querySelector("img").alt;
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = image.alt;
    const facts = [...copy.querySelectorAll(".facts span")].map((one) => one.textContent);
    caption.append(name, facts.join(" · "));
    figure.append(image, caption);
    images.append(figure);
  }
  dialog.showModal();
});

slider.form.reset();
prepare();
if (groups.querySelector("[data-again]")) refresh();
