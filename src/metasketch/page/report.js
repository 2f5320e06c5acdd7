// The page's script: it draws the queries, filters and sorts them, and predicts removals.
// All text goes in as text nodes, never as markup. Nothing is loaded or sent.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const PAGE = 50; // queries that are drawn at once
const ticked = new Set(); // places in data.examples
let changes = null; // predicted change of every query, while something is ticked
let drawn = PAGE;

// Elements.

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function makeButton(words, action) {
  const button = make("button", "", words);
  button.type = "button";
  button.addEventListener("click", action);
  return button;
}

// Numbers and words.

function number(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e5) return value.toExponential(1).replace("-", "−").replace("e-", "e−");
  return String(Number(value.toPrecision(size < 1 ? 2 : 3))).replace("-", "−");
}

function signed(value) {
  return value > 0 ? "+" + number(value) : number(value);
}

function plural(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

function isWorse(change) {
  return data.better === "lower" ? change > 0 : change < 0;
}

function mood(change) {
  return change === 0 ? "" : isWorse(change) ? "worse" : "better";
}

function effectInWords(change, what) {
  const verb = change > 0 ? "raise" : "lower";
  const strong = make("b", "", `${verb} the ${what} by\u00a0${number(Math.abs(change))}`);
  return make("span", "effect", "removing this would ", strong);
}

// Looks: pictures, texts, tokens.

function picture(look, name) {
  const image = make("img");
  image.alt = look.text ? `${name}: ${look.text}` : name;
  image.decoding = "async";
  image.addEventListener("load", () => {
    image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) < 96);
  });
  image.src = look.picture;
  return image;
}

function textOf(look) {
  if (!look) return "";
  return look.text ?? (look.tokens ?? []).join("");
}

function drawLook(look, name) {
  if (!look) return null;
  const parts = [];
  if (look.picture) parts.push(picture(look, name));
  const more = look.more ? ` … (${plural(look.more, "character", "characters")} more)` : "";
  if (look.tokens) {
    parts.push(make("p", "text", ...look.tokens.map((token) => make("span", "token", token)), more));
  } else if (look.text) {
    parts.push(make("p", look.picture ? "caption" : "text", look.text + more));
  }
  return make("div", "look", ...parts);
}

// The effects of removing the ticked examples: change = factor @ (sum of columns).

function unpack(packed) {
  const text = atob(packed);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

let factor = null;

function predict(places) {
  if (places.size === 0) return null;
  let total = null;
  for (const place of places) {
    const example = data.examples[place];
    example.numbers ??= unpack(example.column);
    total ??= new Float64Array(example.numbers.length);
    example.numbers.forEach((value, i) => { total[i] += value; });
  }
  if (data.factor === null) return total;
  factor ??= unpack(data.factor);
  const change = new Float64Array(data.num_queries);
  for (let q = 0; q < change.length; q++) {
    for (let r = 0; r < total.length; r++) change[q] += factor[q * total.length + r] * total[r];
  }
  return change;
}

function tick(places, on) {
  for (const place of places) {
    if (!data.examples[place].column) continue;
    if (on) ticked.add(place);
    else ticked.delete(place);
  }
  changes = predict(ticked);
  for (const box of document.querySelectorAll("input[data-place]")) {
    box.checked = ticked.has(Number(box.dataset.place));
  }
  drawRemoval();
  if (find("sort").value === "change") drawQueries();
  else drawChanges();
}

// One query.

function drawCard(place, effect, what) {
  const example = data.examples[place];
  const box = make("input");
  box.type = "checkbox";
  box.dataset.place = place;
  box.checked = ticked.has(place);
  box.disabled = !example.column;
  box.addEventListener("change", () => tick([place], box.checked));
  const name = make("span", "name", box, make("span", "", example.name));
  const label = make("label", example.column ? "" : "fixed", name,
    drawLook(example.look, example.name), effectInWords(effect, what));
  return make("li", "card", label);
}

function drawKind(kind, list, what) {
  const title = make("h3", "", make("span", kind, kind === "helpful" ? "Most helpful" : "Most harmful"));
  if (list.length === 0) return [title, make("p", "quiet", `No example is ${kind} here.`)];
  const places = list.map(([place]) => place);
  if (places.some((place) => data.examples[place].column)) {
    title.append(makeButton("tick all", () => tick(places, true)));
    title.append(makeButton("untick", () => tick(places, false)));
  }
  const isText = places.some((place) => {
    const look = data.examples[place].look;
    return look && !look.picture;
  });
  const cards = list.map(([place, effect]) => drawCard(place, effect, what));
  return [title, make("ul", isText ? "cards wide" : "cards", ...cards)];
}

function drawAnswer(query, what) {
  return make("div", "answer", drawLook(query.look, query.name),
    ...drawKind("helpful", query.helpful, what), ...drawKind("harmful", query.harmful, what));
}

function scoreInWords([score, ...ends]) {
  const [middle, low, high] = [score, ...ends].map((x) => x.toFixed(2).replace("-", "−"));
  return ends.length ? `LDS ${middle} of exact [${low}, ${high}]` : `LDS ${middle}`;
}

function drawQuery(query, index, open) {
  const title = make("span", "title", make("b", "", query.name));
  const text = query.about ?? textOf(query.look);
  if (text) title.append(make("span", "", text.slice(0, 200)));
  const numbers = make("span", "numbers");
  if (query.value !== null) numbers.append(make("b", "", `${data.noun} ${number(query.value)}`));
  if (query.lds?.length) numbers.append(make("span", "", scoreInWords(query.lds)));
  const change = make("span", "change");
  change.dataset.query = index;
  numbers.append(change);
  const thumb = query.look?.picture ? make("span", "look", picture({ picture: query.look.picture }, "")) : null;
  const element = make("details", "query", make("summary", "", thumb, title, numbers));
  const fill = () => {
    if (element.open && element.children.length === 1) {
      element.append(drawAnswer(query, index < 0 ? `mean ${data.noun}` : data.noun));
    }
  };
  element.addEventListener("toggle", fill);
  element.open = open;
  fill();
  return element;
}

const together = {
  name: "All queries together",
  about: `mean over ${plural(data.num_queries, "query", "queries")}`,
  look: null,
  value: null,
  ...data.together,
};

// The list.

function score(q) {
  return data.queries[q].lds[0] ?? Infinity; // unknown ones come last
}

const byName = new Intl.Collator("en", { numeric: true });
const worst = data.better === "lower" ? 1 : -1;
const hasValues = data.queries.some((query) => query.value !== null);
const SORTS = {
  number: ["number", () => 0],
  name: ["name", (a, b) => byName.compare(data.queries[a].name, data.queries[b].name)],
  norm: ["strength of influence", (a, b) => data.queries[b].norm - data.queries[a].norm],
  ...(hasValues && {
    value: [`worst ${data.noun}`, (a, b) => worst * (data.queries[b].value - data.queries[a].value)],
  }),
  ...(data.queries.some((query) => query.lds.length) && {
    lds: ["least well predicted", (a, b) => score(a) - score(b)],
  }),
  change: ["change by the removal", (a, b) => (changes ? Math.abs(changes[b]) - Math.abs(changes[a]) : 0)],
};

const haystacks = data.queries.map((query) => `${query.name}\n${textOf(query.look)}`.toLowerCase());

function namesExample(query, name) {
  const is = ([place]) => data.examples[place].name.toLowerCase() === name;
  return query.helpful.some(is) || query.harmful.some(is);
}

function chosen() {
  const asked = find("search").value.trim().toLowerCase();
  const words = asked.split(/\s+/);
  const fits = (query, q) => words.every((word) => haystacks[q].includes(word)) || namesExample(query, asked);
  const kept = data.queries.flatMap((query, q) => (asked === "" || fits(query, q) ? [q] : []));
  return kept.sort(SORTS[find("sort").value][1]);
}

let opened = new Set();

function drawQueries() {
  const list = find("list");
  const before = [...list.querySelectorAll("details.query")];
  for (const element of before) {
    if (element.open) opened.add(element.dataset.key);
    else opened.delete(element.dataset.key);
  }
  if (before.length === 0) opened.add("-1");
  const found = chosen();
  const rows = found.slice(0, drawn).map((q) => [data.queries[q], q]);
  if (find("search").value === "") rows.unshift([together, -1]);
  list.replaceChildren(...rows.map(([query, q]) => {
    const element = drawQuery(query, q, opened.has(String(q)));
    element.dataset.key = q;
    return element;
  }));
  const all = data.queries.length;
  find("count").textContent = found.length === all
    ? plural(all, "query", "queries")
    : `${found.length.toLocaleString("en")} of ${plural(all, "query", "queries")}`;
  const left = found.length - drawn;
  find("more").hidden = left <= 0;
  find("more").textContent = `Show ${Math.min(PAGE, left)} more of ${left.toLocaleString("en")}`;
  drawChanges();
}

function drawChanges() {
  for (const element of document.querySelectorAll(".change")) {
    const q = Number(element.dataset.query);
    element.className = "change";
    if (changes === null) {
      element.textContent = "";
    } else {
      const change = q < 0 ? mean(changes) : changes[q];
      element.textContent = signed(change);
      const kind = mood(change);
      if (kind) element.classList.add(kind);
    }
  }
}

// The removal box.

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function drawTicked() {
  return make("ul", "ticked", ...[...ticked].map((place) => {
    const example = data.examples[place];
    const look = example.look?.picture ? drawLook({ picture: example.look.picture }, "") : null;
    const button = makeButton("", () => tick([place], false));
    button.append(...[look, `${example.name} ×`].filter(Boolean));
    button.setAttribute("aria-label", `keep ${example.name}`);
    return make("li", "", button);
  }));
}

function drawTable(order) {
  return make("table", "", make("tbody", "", ...order.map((q) => make("tr", "",
    make("td", "", q < data.queries.length ? data.queries[q].name : `query ${q}`),
    make("td", mood(changes[q]), signed(changes[q]))))));
}

function drawRemoval() {
  const body = find("removal-body");
  if (changes === null) {
    find("removal-line").textContent = "tick examples";
    const words = "Tick examples anywhere on this page. Here stands what removing all of them and " +
      `training again would do to the ${data.noun} of every query, to first order.`;
    body.replaceChildren(make("p", "quiet", words));
    return;
  }
  const average = mean(changes);
  find("removal-line").textContent =
    `${plural(ticked.size, "example", "examples")}: mean ${data.noun} ${signed(average)}`;
  const worse = changes.reduce((count, change) => count + isWorse(change), 0);
  const better = changes.reduce((count, change) => count + isWorse(-change), 0);
  const verb = average > 0 ? "raise" : "lower";
  const summary = make("p", "",
    `Removing ${ticked.size === 1 ? "this example" : `these ${ticked.size} examples`} would `,
    make("b", mood(average), `${verb} the mean ${data.noun} by ${number(Math.abs(average))}`),
    `: worse for ${worse.toLocaleString("en")}, better for ${better.toLocaleString("en")} of ` +
    `${plural(changes.length, "query", "queries")}.`);
  const order = [...changes.keys()].sort((a, b) => Math.abs(changes[b]) - Math.abs(changes[a]));
  const shown = order.slice(0, data.queries.length);
  const area = make("textarea");
  area.readOnly = true;
  area.id = "removed";
  area.setAttribute("aria-label", "numbers of the ticked examples, for Python");
  const numbers = [...ticked].map((place) => data.examples[place].index).sort((a, b) => a - b);
  area.value = `removed = [${numbers.join(", ")}]`;
  area.addEventListener("focus", () => area.select());
  body.replaceChildren(summary, drawTicked(),
    make("div", "buttons", makeButton("Untick all", () => tick([...ticked], false))),
    make("h3", "", "Change of each query, largest first"), make("div", "all", drawTable(shown)),
    make("h3", "", "For Python"), area,
    make("p", "quiet", "influence.predict_removal(removed) gives the same numbers; training again with " +
      "weights of 0 there gives the true ones."));
}

// Start.

for (const [key, [words]] of Object.entries(SORTS)) {
  const option = make("option", "", words);
  option.value = key;
  find("sort").append(option);
}
const redraw = () => { drawn = PAGE; drawQueries(); };
find("search").addEventListener("input", redraw);
find("sort").addEventListener("change", redraw);
find("more").addEventListener("click", () => { drawn += PAGE; drawQueries(); });
find("removal-box").open = window.matchMedia("(min-width: 60.01rem)").matches;
find("columns").hidden = false;
drawRemoval();
drawQueries();
