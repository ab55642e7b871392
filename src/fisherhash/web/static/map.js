// The map: every image is a point, and near points look alike. A million points are drawn as pixels;
// thumbnails stand for what is around them, and there are more of them the nearer one looks.
const box = document.querySelector(".map");
const canvas = box.querySelector("canvas");
const status = box.querySelector(".status");
const hover = box.querySelector(".hover");
const pen = canvas.getContext("2d");

const SIDE = 65536; // places on the map, across and down
const CELLS = 256; // cells of the grid that finds points near a place
const TILE = 92; // screen pixels that one thumbnail has to itself, at least
const MOST_IMAGES = 600; // thumbnails that are kept in memory
const PALETTE = ["#4e79d9", "#e1812c", "#3a9e6e", "#c44e52", "#8f6cc9", "#a8785a", "#d678b8", "#5b6b2f", "#b5a32b", "#32a8c4"];

let ids, places, colours, names;
let starts, order; // points by cell of the grid
let view = { x: 0.5, y: 0.5, scale: 1 };
let ratio = 1;
const images = new Map();
const levels = new Map();

async function load() {
  for (;;) {
    const answer = await fetch(box.dataset.source);
    if (answer.status === 202) {
      await new Promise((done) => setTimeout(done, 800));
      continue;
    }
    if (!answer.ok) throw new Error((await answer.json()).error);
    read(await answer.arrayBuffer());
    return;
  }
}

function read(buffer) {
  const length = new Float64Array(buffer, 0, 1)[0];
  names = new TextDecoder().decode(new Uint8Array(buffer, 8, length)).split("\n").filter(Boolean);
  let at = 8 + 8 * Math.ceil(length / 8);
  const count = new Float64Array(buffer, at, 1)[0];
  at += 8;
  ids = new Float64Array(buffer, at, count);
  at += 8 * count;
  places = new Uint16Array(buffer, at, 2 * count);
  at += 4 * count;
  colours = new Uint8Array(buffer, at, count);
  sortIntoCells(count);
}

function cellOf(point) {
  return (places[2 * point + 1] >> 8) * CELLS + (places[2 * point] >> 8);
}

function sortIntoCells(count) {
  starts = new Uint32Array(CELLS * CELLS + 1);
  for (let point = 0; point < count; point++) starts[cellOf(point) + 1]++;
  for (let cell = 0; cell < CELLS * CELLS; cell++) starts[cell + 1] += starts[cell];
  const next = starts.slice();
  order = new Uint32Array(count);
  for (let point = 0; point < count; point++) order[next[cellOf(point)]++] = point;
}

// Screen pixels of the whole map, which fills a wide or high screen, and where a place is on it.
function wide() {
  return Math.min(canvas.width, 1.7 * canvas.height) * view.scale;
}
function high() {
  return Math.min(canvas.height, 1.7 * canvas.width) * view.scale;
}
function across(place) {
  return (place / SIDE - view.x) * wide() + canvas.width / 2;
}
function down(place) {
  return (place / SIDE - view.y) * high() + canvas.height / 2;
}

function visibleCells() {
  const x = canvas.width / wide() / 2;
  const y = canvas.height / high() / 2;
  const clamp = (value) => Math.max(0, Math.min(CELLS - 1, Math.floor(value * CELLS)));
  return [clamp(view.x - x), clamp(view.x + x), clamp(view.y - y), clamp(view.y + y)];
}

function forVisible(action) {
  const [left, right, top, bottom] = visibleCells();
  for (let row = top; row <= bottom; row++) {
    const end = starts[row * CELLS + right + 1];
    for (let at = starts[row * CELLS + left]; at < end; at++) action(order[at]);
  }
}

let asked = false;
function redraw() {
  if (asked || !ids) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    drawPoints();
    drawImages();
  });
}

function drawPoints() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const shades = PALETTE.map((text) => parseInt(text.slice(1), 16));
  const other = dark ? 0x8a92a4 : 0x8088a0;
  const picture = pen.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(picture.data.buffer);
  const stride = canvas.width;
  const size = Math.round(ratio * Math.max(1, Math.min(6, 5 - Math.log10(ids.length / 1000) + Math.log2(view.scale) / 2)));
  const alpha = ids.length > 200000 && view.scale < 4 ? 0x70 : 0xd0;
  const paint = [...shades, other].map(
    (shade) => ((alpha << 24) | ((shade & 255) << 16) | (shade & 0xff00) | (shade >> 16)) >>> 0,
  );
  const perX = wide() / SIDE;
  const perY = high() / SIDE;
  const x0 = canvas.width / 2 - view.x * wide();
  const y0 = canvas.height / 2 - view.y * high();
  forVisible((point) => {
    const x = (places[2 * point] * perX + x0) | 0;
    const y = (places[2 * point + 1] * perY + y0) | 0;
    if (x < 0 || y < 0 || x + size >= stride || y + size >= canvas.height) return;
    const colour = paint[Math.min(colours[point], PALETTE.length)];
    for (let row = 0; row < size; row++) {
      const from = (y + row) * stride + x;
      for (let column = 0; column < size; column++) pixels[from + column] = colour;
    }
  });
  pen.putImageData(picture, 0, 0);
}

// One image per tile of the map; tiles halve as one comes nearer, so images stay where they are.
function tilesOf(shiftX, shiftY) {
  const level = 32 * shiftX + shiftY;
  if (!levels.has(level)) {
    const first = new Map();
    // In steps of a prime, or the images that were added first would stand for all others.
    const step = ids.length % 7919 ? 7919 : 7907;
    for (let at = 0, point = 0; at < ids.length; at++, point = (point + step) % ids.length) {
      const tile = (places[2 * point + 1] >> shiftY) * SIDE + (places[2 * point] >> shiftX);
      if (!first.has(tile)) first.set(tile, point);
    }
    levels.set(level, first);
  }
  return levels.get(level);
}

function shiftOf(extent) {
  return 16 - Math.max(0, Math.min(14, Math.floor(Math.log2(extent / (TILE * ratio)))));
}

// A thumbnail stays inside its tile, so that none hides another.
function kept(place, low, size, side) {
  return Math.max(low + 3, Math.min(low + size - side - 3, place - side / 2));
}

function drawImages() {
  const shiftX = shiftOf(wide());
  const shiftY = shiftOf(high());
  const tileX = (wide() / SIDE) * 2 ** shiftX;
  const tileY = (high() / SIDE) * 2 ** shiftY;
  const side = Math.round(Math.min(0.66 * Math.min(tileX, tileY), 130 * ratio));
  const radius = 9 * ratio;
  const [left, right, top, bottom] = visibleCells().map((cell, edge) => {
    const place = cell * 256 + (edge % 2 ? 255 : 0);
    return place >> (edge < 2 ? shiftX : shiftY);
  });
  const chosen = tilesOf(shiftX, shiftY);
  for (let row = top; row <= bottom; row++) {
    for (let column = left; column <= right; column++) {
      const point = chosen.get(row * SIDE + column);
      if (point === undefined) continue;
      const image = imageOf(point);
      if (!image) continue;
      const x = kept(across(places[2 * point]), across(column << shiftX), tileX, side);
      const y = kept(down(places[2 * point + 1]), down(row << shiftY), tileY, side);
      pen.save();
      pen.beginPath();
      pen.roundRect(x, y, side, side, radius);
      pen.clip();
      const scale = side / Math.min(image.width, image.height);
      pen.drawImage(image, x + (side - image.width * scale) / 2, y + (side - image.height * scale) / 2, image.width * scale, image.height * scale);
      pen.restore();
      pen.beginPath();
      pen.roundRect(x, y, side, side, radius);
      pen.lineWidth = 2 * ratio;
      pen.strokeStyle = PALETTE[colours[point]] ?? "#8088a0";
      pen.stroke();
    }
  }
}

let loading = 0;
const waiting = [];

function imageOf(point) {
  const known = images.get(point);
  if (known) return known.ready ? known.image : null;
  const image = new Image();
  const entry = { image, ready: false };
  images.set(point, entry);
  if (images.size > MOST_IMAGES) images.delete(images.keys().next().value);
  waiting.push(() => {
    image.onload = () => {
      entry.ready = true;
      next();
      redraw();
    };
    image.onerror = next;
    image.src = `/images/${ids[point]}/small`;
  });
  start();
  return null;
}

function start() {
  while (loading < 6 && waiting.length) {
    loading += 1;
    // The last that was asked for is the one that is looked at now.
    waiting.pop()();
  }
  if (waiting.length > 300) waiting.splice(0, waiting.length - 300);
}

function next() {
  loading -= 1;
  start();
}

function resize() {
  ratio = Math.min(window.devicePixelRatio || 1, 2);
  canvas.width = Math.round(box.clientWidth * ratio);
  canvas.height = Math.round(box.clientHeight * ratio);
  redraw();
}

function limit() {
  view.scale = Math.max(0.8, Math.min(400, view.scale));
  view.x = Math.max(0, Math.min(1, view.x));
  view.y = Math.max(0, Math.min(1, view.y));
}

function zoom(factor, x = canvas.width / 2, y = canvas.height / 2) {
  const atX = view.x + (x - canvas.width / 2) / wide();
  const atY = view.y + (y - canvas.height / 2) / high();
  view.scale *= factor;
  limit();
  view.x = atX - (x - canvas.width / 2) / wide();
  view.y = atY - (y - canvas.height / 2) / high();
  limit();
  hover.hidden = true;
  redraw();
}

function move(x, y) {
  view.x -= x / wide();
  view.y -= y / high();
  limit();
  hover.hidden = true;
  redraw();
}

function nearest(x, y, reach) {
  let best = -1;
  let least = reach * reach;
  const placeX = (view.x + (x - canvas.width / 2) / wide()) * CELLS;
  const placeY = (view.y + (y - canvas.height / 2) / high()) * CELLS;
  const cells = Math.ceil((reach / Math.min(wide(), high())) * CELLS);
  const clamp = (value) => Math.max(0, Math.min(CELLS - 1, Math.floor(value)));
  for (let row = clamp(placeY - cells); row <= clamp(placeY + cells); row++) {
    const end = starts[row * CELLS + clamp(placeX + cells) + 1];
    for (let at = starts[row * CELLS + clamp(placeX - cells)]; at < end; at++) {
      const point = order[at];
      const apart = (across(places[2 * point]) - x) ** 2 + (down(places[2 * point + 1]) - y) ** 2;
      if (apart < least) {
        least = apart;
        best = point;
      }
    }
  }
  return best;
}

function open(point) {
  if (point >= 0) location.assign(`/?like=${ids[point]}`);
}

const pointers = new Map();
let moved = 0;

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
  if (pointers.size === 1) moved = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) {
    show(event);
    return;
  }
  const x = (event.clientX - before.clientX) * ratio;
  const y = (event.clientY - before.clientY) * ratio;
  if (pointers.size === 2) {
    const [one, two] = [...pointers.values()];
    const was = Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY);
    pointers.set(event.pointerId, event);
    const [three, four] = [...pointers.values()];
    const now = Math.hypot(three.clientX - four.clientX, three.clientY - four.clientY);
    const middle = canvas.getBoundingClientRect();
    if (was > 0) {
      zoom(now / was, ((three.clientX + four.clientX) / 2 - middle.left) * ratio, ((three.clientY + four.clientY) / 2 - middle.top) * ratio);
    }
  } else {
    pointers.set(event.pointerId, event);
  }
  moved += Math.abs(x) + Math.abs(y);
  if (moved > 6) move(x / pointers.size, y / pointers.size);
});
for (const kind of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(kind, (event) => {
    const alone = pointers.size === 1;
    pointers.delete(event.pointerId);
    if (kind === "pointerup" && alone && moved <= 6 && ids) {
      const middle = canvas.getBoundingClientRect();
      open(nearest((event.clientX - middle.left) * ratio, (event.clientY - middle.top) * ratio, 40 * ratio));
    }
  });
}
canvas.addEventListener("pointerleave", () => (hover.hidden = true));
canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    const middle = canvas.getBoundingClientRect();
    const steps = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
    zoom(Math.exp(-steps / 400), (event.clientX - middle.left) * ratio, (event.clientY - middle.top) * ratio);
  },
  { passive: false },
);
canvas.addEventListener("keydown", (event) => {
  const step = 60 * ratio;
  const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
  if (moves[event.key]) move(...moves[event.key]);
  else if (event.key === "+" || event.key === "=") zoom(1.4);
  else if (event.key === "-") zoom(1 / 1.4);
  else if (event.key === "Enter" && ids) open(nearest(canvas.width / 2, canvas.height / 2, 400 * ratio));
  else return;
  event.preventDefault();
});
for (const button of box.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    const factor = Number(button.dataset.zoom);
    if (factor) zoom(factor);
    else {
      view = { x: 0.5, y: 0.5, scale: 1 };
      redraw();
    }
  });
}

let shown = -1;
function show(event) {
  if (!ids || event.pointerType === "touch") return;
  const middle = canvas.getBoundingClientRect();
  const x = event.clientX - middle.left;
  const y = event.clientY - middle.top;
  const point = nearest(x * ratio, y * ratio, 22 * ratio);
  hover.hidden = point < 0;
  if (point < 0) return;
  if (point !== shown) {
    shown = point;
    hover.querySelector("img").src = `/images/${ids[point]}/medium`;
    hover.querySelector("span").textContent = names[colours[point]] ?? "";
  }
  const left = Math.min(x + 18, box.clientWidth - 210);
  const top = Math.min(y + 18, box.clientHeight - 226);
  hover.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

function legend() {
  const list = box.querySelector(".keys");
  const rest = names.length && colours.includes(255) ? ["other"] : [];
  [...names, ...rest].forEach((name, number) => {
    const item = document.createElement("li");
    const colour = number < names.length ? PALETTE[number] : "#8088a0";
    item.innerHTML = `<svg viewBox="0 0 10 10" aria-hidden="true"><circle cx="5" cy="5" r="5" fill="${colour}"/></svg>`;
    item.append(name);
    list.append(item);
  });
}

new ResizeObserver(resize).observe(box);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
load()
  .then(() => {
    status.hidden = ids.length > 0;
    status.textContent = ids.length ? `${ids.length} images` : "The index is empty.";
    box.dataset.points = ids.length;
    legend();
    resize();
  })
  .catch((error) => {
    status.textContent = error.message;
  });
