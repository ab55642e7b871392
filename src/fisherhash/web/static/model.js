// The bits come on their own: a sample of the images has to be encoded first.
const rows = document.querySelector(".bit-rows");

async function load() {
  const answer = await fetch(rows.dataset.source, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
  rows.replaceChildren(...parsed.body.childNodes);
  const again = rows.querySelector("[data-again]");
  if (again) setTimeout(load, 1000 * Number(again.dataset.again));
}

if (rows) load();
