"use strict";
// The part of the page that shows rollouts: a group of samples of one prompt, or a few samples in an order, at a time.
function samplePages(main, { data, state, keepState, make, words, choice, number, several }) {
  const SERIES = { step: "before step", eval: "held-out, after step", baseline: "greedy, before step" };
  const EACH = 10; // samples of a page, where it is not a group
  const box = make("section", { id: "samples" });
  main.append(make("h2", {}, "Samples"), box);

  const files = () => data.runs[state.run].samples.files;
  const name = (file) => `${file.series} ${file.step}`;

  function current() {
    const found = files().find((file) => name(file) === state.file);
    return found || files().filter((file) => file.series === "step").pop() || files()[files().length - 1];
  }

  const ORDERS = {
    sampled: ["as sampled", null],
    high: ["reward, high to low", (a, b) => of(b.reward, -Infinity) - of(a.reward, -Infinity)],
    low: ["reward, low to high", (a, b) => of(a.reward, Infinity) - of(b.reward, Infinity)],
    long: ["longest first", (a, b) => of(b.response_length, 0) - of(a.response_length, 0)],
    advantage: ["advantage, high to low", (a, b) => of(b.advantage, -Infinity) - of(a.advantage, -Infinity)],
  };
  const of = (value, otherwise) => (typeof value === "number" ? value : otherwise);

  function pages(file) {
    const compare = (ORDERS[state.order] || ORDERS.sampled)[1];
    const sorted = compare ? [...file.samples].sort(compare) : file.samples;
    if (state.by !== "group") {
      return Array.from({ length: Math.ceil(sorted.length / EACH) }, (_, i) => sorted.slice(i * EACH, (i + 1) * EACH));
    }
    const groups = new Map(file.samples.map((sample) => [sample.index, []]));
    sorted.forEach((sample) => groups.get(sample.index).push(sample));
    return [...groups.values()];
  }

  // ---------------------------------------------------------------------------------------------------------- texts

  function messages(content) {
    if (!Array.isArray(content)) return [textOf(content)];
    return content.flatMap((message) => {
      const { role, content: said, ...more } = message && typeof message === "object" ? message : { content: message };
      const rest = Object.keys(more).length ? [textOf(JSON.stringify(more), "given")] : [];
      return [make("div", { class: "role" }, words(role === undefined ? "" : role)), textOf(said), ...rest];
    });
  }

  const textOf = (content, kind = "") =>
    make("div", { class: `words ${kind}`, dir: "auto" }, words(typeof content === "string" ? content : JSON.stringify(content === undefined ? null : content)));

  function colourOf(sample, i, most) {
    if (!sample.mask[i] || state.colour === "none") return "";
    if (state.colour === "log_probs") {
      const value = sample.log_probs[i];
      return value === null ? "" : `rgba(214, 96, 20, ${Math.min(-value / 5, 1) * 0.75})`;
    }
    const value = advantageOf(sample, i);
    if (value === null || !most) return "";
    return `rgba(${value > 0 ? "36, 120, 60" : "190, 40, 60"}, ${Math.min(Math.abs(value) / most, 1) * 0.6})`;
  }

  function advantageOf(sample, i) {
    const value = sample.advantages ? sample.advantages[i] : sample.advantage;
    return typeof value === "number" ? value : null;
  }

  function tokens(sample, most) {
    const node = make("div", { class: "words tokens", dir: "auto" });
    sample.ids.forEach((id, i) => {
      const text = sample.texts ? sample.texts[i] : `${id} `;
      if (text === "") return;
      const span = make("span", { class: sample.mask[i] ? "token" : "given" });
      words(text, span);
      span.style.backgroundColor = colourOf(sample, i, most);
      const value = sample.log_probs[i];
      const facts = [`token ${id}`];
      if (sample.mask[i]) {
        if (value !== null) facts.push(`log-prob ${value} (p ${number(Math.exp(value))})`);
        if (advantageOf(sample, i) !== null) facts.push(`advantage ${number(advantageOf(sample, i))}`);
      } else facts.push("not sampled by the policy");
      span.title = facts.join(", ");
      node.append(span);
    });
    if (sample.tokens_left_out) node.append(make("span", { class: "odd" }, ` ${sample.tokens_left_out} more tokens are not on this page`));
    return node;
  }

  function card(sample, most, withPrompt) {
    const fact = (label, value) => make("span", {}, words(label), " ", make("b", {}, words(number(value))));
    const facts = [fact("reward", sample.reward)];
    for (const [label, value] of Object.entries(sample.rewards || {})) facts.push(fact(label, value));
    if (sample.environment !== undefined) facts.push(fact("environment", sample.environment));
    facts.push(fact("advantage", sample.advantage), fact("tokens", sample.response_length));
    if (sample.turns > 1) facts.push(fact("turns", sample.turns));
    facts.push(make("span", {}, sample.finished ? "finished" : words(`ended at the limit of ${sample.cut_by || "tokens or turns"}`)));
    facts.push(make("span", { class: "muted" }, words(`sample ${sample.sample} of ${sample.row}`)));
    const plain = state.colour === "none" || !sample.ids;
    return make("div", { class: "sample" }, make("div", { class: "facts" }, ...facts),
      withPrompt ? make("details", {}, make("summary", { class: "muted" }, "prompt"), ...messages(sample.prompt)) : null,
      ...(plain ? (sample.conversation ? messages(sample.conversation) : [textOf(sample.completion)]) : [tokens(sample, most)]));
  }

  // ----------------------------------------------------------------------------------------------------------- page

  function turn(by) {
    state.page += by;
    show();
  }

  function show() {
    keepState();
    const run = data.runs[state.run];
    box.replaceChildren(...run.samples.notes.map((note) => make("p", { class: "note" }, words(note))));
    const bar = make("div", { class: "bar" });
    const changed = (key, value) => { state[key] = value; state.page = 0; show(); };
    if (several) {
      bar.append(choice("run", data.runs.map((one, i) => [i, one.name]), state.run, (value) => changed("run", Number(value))));
    }
    box.append(bar);
    const file = current();
    if (!file) return void box.append(make("p", {}, "This run has no samples here."));
    const all = pages(file);
    state.page = Math.min(Math.max(state.page, 0), Math.max(all.length - 1, 0));
    const here = all[state.page] || [];
    const button = (text, by, id) => {
      const node = make("button", { type: "button", id, disabled: !all[state.page + by] }, text);
      node.addEventListener("click", () => turn(by));
      return node;
    };
    bar.append(
      choice("rollout", files().map((one) => [name(one), `${SERIES[one.series]} ${one.step.toLocaleString("en-US")}`]), name(file), (value) => changed("file", value)),
      choice("by", [["group", "prompt"], ["sample", "sample"]], state.by, (value) => changed("by", value)),
      choice("order", Object.entries(ORDERS).map(([key, [text]]) => [key, text]), state.order, (value) => changed("order", value)),
      choice("tokens by", [["log_probs", "log-prob"], ["advantage", "advantage"], ["none", "no colour"]], state.colour, (value) => { state.colour = value; show(); }),
      button("◀", -1, "previous"),
      make("span", { id: "where" }, `${state.page + 1} of ${all.length}`),
      button("▶", 1, "next"),
      make("span", { class: "muted" }, `${file.samples.length} of the file's ${file.of} samples are here`),
    );
    const numbers = file.samples.flatMap((sample) => (sample.advantages || [sample.advantage]).filter((x) => typeof x === "number"));
    const most = numbers.reduce((found, x) => Math.max(found, Math.abs(x)), 0);
    if (state.by === "group" && here.length) {
      box.append(make("div", { class: "prompt" }, make("div", { class: "muted" }, words(`prompt: ${here[0].row}`)), ...messages(here[0].prompt)));
    }
    box.append(legend(most), ...here.map((sample) => card(sample, most, state.by !== "group")));
  }

  function legend(most) {
    const text = {
      log_probs: "the less likely the sampler found a token, the darker: from log-prob 0 to -5 and below",
      advantage: `green is a positive advantage, red a negative one, darkest at ${number(most)}`,
      none: "",
    }[state.colour];
    return make("p", { class: "muted" }, text || "");
  }

  document.addEventListener("keydown", (event) => {
    const inside = box.getBoundingClientRect();
    const isSeen = inside.top < window.innerHeight && inside.bottom > 0;
    if (!isSeen || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const buttons = { ArrowLeft: "previous", ArrowRight: "next" };
    if (buttons[event.key]) document.getElementById(buttons[event.key])?.click();
  });
  show();
}
