// "Will it fit?": a model or a workload file, a GPU and a batch -> the page of its plans.
// The question stands in the address, but only the button asks it: a link starts no work.

import { h } from "./dom";
import {
  type Asked,
  type Choices,
  type GpuChoice,
  type Line,
  type Model,
  linesOf,
  parameters,
  status,
} from "./fit_data";
import { copyable } from "./parts";
import { showPlans } from "./plans";
import { duration } from "./report_words";
import { bytes } from "./words";

const USUAL = { batch: "8", tokens: 1024, gpu: "rtx4090" }; // as src/oomph/rehearsing has them
const OF_FILE = "file:"; // in the value of a choice: a workload, and not a model

export function showFit(root: HTMLElement, choices: Choices, given: URLSearchParams): void {
  document.title = "Will it fit? · oomph";
  const what = h("select", { id: "what", required: true }, ...whatToTrain(choices));
  const gpu = h("select", { id: "gpu", required: true }, ...gpusOf(choices));
  const [batch, tokens, gpus] = [number("batch_size", 1e6), number("seq_len", 1e6), number("max_gpus", 64)];
  gpus.placeholder = "1";
  const button = h("button", { type: "submit", class: "ask" }, "Will it fit?");
  const told = h("p", { class: "progress", role: "status" });
  const command = h("div", { class: "command" });
  const plans = h("div", { class: "plans-found" });
  const form = h(
    "form",
    { class: "fit", autocomplete: "off" },
    field("What to train", what, "wide"),
    field("GPU", gpu, "middle"),
    field("Batch size", batch, ""),
    field("Tokens in a sequence", tokens, ""),
    field("GPUs, at most", gpus, ""),
    button,
  );
  root.replaceChildren(
    h(
      "div",
      { class: "asking" },
      h(
        "header",
        {},
        h("p", { class: "eyebrow" }, h("b", {}, "oomph plan"), " without a GPU: nothing is trained"),
        h("h1", {}, "Will it fit?"),
        h("p", { class: "given" }, ...about(choices)),
      ),
      h("section", { "aria-label": "The question" }, form, told, command),
    ),
    plans,
  );
  let searching: AbortController | null = null;

  const adapt = (): void => {
    const model = choices.models.find(({ name }) => name === what.value);
    tokens.disabled = !model || model.is_of_images;
    if (tokens.disabled) tokens.value = "";
    tokens.placeholder = tokensOf(model);
    tokens.max = String(model?.most_tokens ?? 1e6);
    batch.placeholder = model ? USUAL.batch : "its own";
  };
  const asked = (): Asked => {
    const isFile = what.value.startsWith(OF_FILE);
    const all = {
      model: isFile ? "" : what.value,
      workload: isFile ? what.value.slice(OF_FILE.length) : "",
      gpu: gpu.value,
      batch_size: batch.value,
      seq_len: tokens.value,
      max_gpus: gpus.value,
    };
    return Object.fromEntries(Object.entries(all).filter(([, value]) => value));
  };
  const show = (line: Line, ending: AbortSignal): void => {
    if (line.kind === "asked") command.replaceChildren(copyable(line.command, "The same on a terminal"));
    else if (line.kind === "plans") {
      told.replaceChildren();
      showPlans(plans, line.plans, ending);
      document.title = `${document.title} · oomph`;
    } else if (line.kind === "error") showError(line.what, line.because, line.try);
    else told.replaceChildren(h("b", {}, duration(line.elapsed_s)), ` ${status(line)}`);
  };
  const showError = (said: string, because: string | null, attempt: string | null): void => {
    const fault = h(
      "span",
      { class: "fault" },
      h("span", { class: "warning" }, said),
      because && h("span", { class: "rest" }, because),
      attempt && h("span", { class: "rest" }, "try: ", h("code", {}, attempt)),
    );
    told.replaceChildren(fault);
  };
  const search = async (): Promise<void> => {
    shown.abort(); // the plans before listen to nothing any more
    shown = new AbortController();
    const running = (searching = new AbortController());
    button.textContent = "Stop";
    plans.replaceChildren();
    command.replaceChildren();
    told.textContent = "Asking";
    const query = new URLSearchParams(asked());
    history.replaceState(null, "", `?fit&${query}`);
    try {
      for await (const line of answers(query, running.signal)) show(line, shown.signal);
    } catch (error) {
      if (running.signal.aborted) told.textContent = "Stopped.";
      else showError(error instanceof Error ? error.message : String(error), null, null);
    } finally {
      searching = null;
      button.textContent = "Will it fit?";
    }
  };
  let shown = new AbortController();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (searching) searching.abort();
    else void search();
  });
  form.addEventListener("input", adapt);
  addEventListener("pagehide", () => searching?.abort());
  fill(given, what, gpu, { batch_size: batch, seq_len: tokens, max_gpus: gpus }, choices);
  adapt();
}

/** The lines of a search, as they come. */
async function* answers(query: URLSearchParams, signal: AbortSignal): AsyncGenerator<Line> {
  const answer = await fetch(`api/fit?${query}`, { signal, headers: { "x-oomph": "fit" } });
  if (!answer.ok || !answer.body) {
    const isJson = answer.headers.get("content-type")?.startsWith("application/json");
    const content = isJson ? ((await answer.json()) as { error?: string }) : {};
    throw new Error(content.error ?? `${answer.status} ${answer.statusText}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isAnswered = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const found = linesOf(rest + value);
    rest = found.rest;
    for (const line of found.lines) {
      isAnswered = line.kind === "plans" || line.kind === "error";
      yield line;
    }
  }
  if (!isAnswered) throw new Error("the server ended without an answer");
}

// ---- the form ----------------------------------------------------------------------------------

const about = (choices: Choices): (Node | string)[] =>
  choices.directory === null
    ? [
        "Choose a model by its name. Your own: ",
        h("code", {}, "oomph serve --workloads DIRECTORY"),
        " offers the Workloads in its files.",
      ]
    : ["Models by name, and the Workloads in files below ", h("code", {}, choices.directory), "."];

function field(name: string, input: HTMLElement, kind: string): HTMLElement {
  return h("label", { class: kind, for: input.id }, h("span", {}, name), input);
}

const number = (name: string, most: number): HTMLInputElement =>
  h("input", { id: name, type: "number", inputmode: "numeric", min: 1, max: most, step: 1 });

function whatToTrain({ models, workloads, directory }: Choices): HTMLElement[] {
  const files = workloads.map((name) => h("option", { value: OF_FILE + name }, name));
  const none = h("option", { disabled: true }, "no Workload was found");
  return [
    ...(directory === null
      ? []
      : [h("optgroup", { label: "Workloads in files" }, ...(files.length ? files : [none]))]),
    h("optgroup", { label: "Models by name" }, ...models.map(modelOption)),
  ];
}

const modelOption = ({ name, num_parameters }: Model): HTMLElement =>
  h(
    "option",
    { value: name },
    num_parameters === null ? name : `${name} · ${parameters(num_parameters)} parameters`,
  );

function gpusOf({ gpus, here }: Choices): HTMLElement[] {
  const option = ({ name, title, memory_bytes }: GpuChoice): HTMLElement =>
    h("option", { value: name }, title.includes("GB") ? title : `${title} · ${bytes(memory_bytes)}`);
  const own = gpus.filter(({ name }) => here.includes(name));
  const others = gpus.filter(({ name }) => !here.includes(name)).reverse(); // the newest first
  return [
    ...(own.length ? [h("optgroup", { label: "In this machine" }, ...own.map(option))] : []),
    h("optgroup", { label: own.length ? "Others" : "GPUs" }, ...others.map(option)),
  ];
}

const tokensOf = (model: Model | undefined): string =>
  !model ? "as in the file" : model.is_of_images ? "images have none" : tokensOfText(model.most_tokens);

const tokensOfText = (most: number | null): string => {
  const usual = Math.min(USUAL.tokens, most ?? USUAL.tokens);
  return most === null ? String(usual) : `${usual}, at most ${most}`;
};

/** What the address asks; what it does not say is as usual. */
function fill(
  given: URLSearchParams,
  what: HTMLSelectElement,
  gpu: HTMLSelectElement,
  numbers: Record<string, HTMLInputElement>,
  choices: Choices,
): void {
  const workload = given.get("workload");
  choose(what, workload ? OF_FILE + workload : given.get("model"));
  choose(gpu, given.get("gpu") ?? (choices.here.length ? null : USUAL.gpu));
  for (const [name, input] of Object.entries(numbers))
    if (/^\d{1,7}$/.test(given.get(name) ?? "")) input.value = given.get(name) ?? "";
}

function choose(select: HTMLSelectElement, value: string | null): void {
  const options = [...select.options];
  const found = options.find((option) => option.value === value) ?? options.find((o) => !o.disabled);
  if (found) found.selected = true;
}
