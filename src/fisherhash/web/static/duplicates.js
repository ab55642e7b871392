// The threshold regroups at once; images side by side; how many are marked.
const slider = document.querySelector("#radius");
const groups = document.querySelector("#groups");
const marked = document.querySelector(".marked");
const dialog = document.querySelector(".beside");

function count() {
  const all = document.querySelectorAll("input[name=remove]:checked").length;
  marked.textContent = `${all} image${all === 1 ? " is" : "s are"} marked`;
  for (const button of document.querySelectorAll(".export [name=format]")) button.disabled = !all;
}

function prepare() {
  for (const buttons of document.querySelectorAll(".choices, .export .worse")) buttons.hidden = false;
  count();
}

let running = false;
let wanted = null;

async function refresh() {
  wanted = slider.value;
  if (running) return;
  running = true;
  while (wanted !== null) {
    const now = wanted;
    wanted = null;
    const answer = await fetch(`/duplicates/groups?radius=${now}`, { headers: { Accept: "text/html" } });
    if (!answer.ok) break;
    groups.innerHTML = await answer.text();
    history.replaceState(null, "", `/duplicates?radius=${now}`);
    prepare();
    const again = groups.querySelector("[data-again]");
    if (again) {
      await new Promise((done) => setTimeout(done, 1000 * Number(again.dataset.again)));
      wanted ??= now;
    }
  }
  running = false;
}

slider.addEventListener("input", () => {
  const number = Number(slider.value);
  document.querySelector("output[for=radius]").textContent = `${number} bit${number === 1 ? "" : "s"}`;
  refresh();
});
slider.form.addEventListener("submit", (event) => event.preventDefault());
groups.addEventListener("change", count);

// Nothing is marked until somebody asks for it.
document.querySelector(".review").addEventListener("click", (event) => {
  if (!event.target.classList.contains("worse")) return;
  const place = event.target.closest(".group") ?? groups;
  for (const box of place.querySelectorAll("[name=remove]")) box.checked = "worse" in box.dataset;
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
if (groups.dataset.ready === "no") refresh();
