// A page for a file: src/NAME.ts, NAME.css and NAME.html -> src/oomph/showing/page/NAME.html, without
// links. The policy in its head names its one script and its one style by hash: the browser itself
// refuses any other code, and any request.
// A page for a server: the same, but as files of their own, beside NAME.svg, its icon. The server's
// policy allows what comes from it, and nothing else.
import { createHash } from "node:crypto";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import * as esbuild from "esbuild";

const PAGES = ["plan", "report", "explain"];
const SERVED = ["dashboard"];
// `npm run build -- DIRECTORY` builds into another: a test compares it with what git has.
const [, , elsewhere] = process.argv;
const OUT = elsewhere
  ? pathToFileURL(`${resolve(elsewhere)}/`)
  : new URL("../src/oomph/showing/page/", import.meta.url);

async function bundled(entry) {
  const { outputFiles } = await esbuild.build({
    absWorkingDir: new URL(".", import.meta.url).pathname,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    charset: "utf8",
    format: "iife",
    target: "es2020",
    legalComments: "none",
  });
  // Text inside an element ends at "</": neither may hold one.
  return outputFiles[0].text.trim().replaceAll("</", "<\\/");
}

const hash = (text) => `'sha256-${createHash("sha256").update(text, "utf8").digest("base64")}'`;

// The hashes are of every character between the tags, so that no space may stand there.
function put(page, [place, text]) {
  if (!page.includes(place)) throw new Error(`the page has no ${place}`);
  return page.replace(place, () => text);
}

async function build(name) {
  const [script, style, html] = await Promise.all([
    bundled(`src/${name}.ts`),
    bundled(`src/${name}.css`),
    readFile(new URL(`src/${name}.html`, import.meta.url), "utf8"),
  ]);
  const policy = `default-src 'none'; script-src ${hash(script)}; style-src ${hash(style)}; img-src data:; base-uri 'none'; form-action 'none'`;
  const page = [
    ["%policy%", policy],
    ["<style>%style%</style>", `<style>${style}</style>`],
    ["<script>%script%</script>", `<script>${script}</script>`],
  ].reduce(put, html);
  await write(`${name}.html`, page);
}

async function buildServed(name) {
  const source = (end) => new URL(`src/${name}.${end}`, import.meta.url);
  await Promise.all([
    bundled(`src/${name}.ts`).then((script) => write(`${name}.js`, script)),
    bundled(`src/${name}.css`).then((style) => write(`${name}.css`, style)),
    readFile(source("html"), "utf8").then((page) => write(`${name}.html`, page)),
    readFile(source("svg"), "utf8").then((icon) => write(`${name}.svg`, icon)),
  ]);
}

async function write(name, text) {
  await writeFile(new URL(name, OUT), text);
  console.log(`${name}: ${(text.length / 1024).toFixed(1)} KiB`);
}

await mkdir(OUT, { recursive: true });
await Promise.all([...PAGES.map(build), ...SERVED.map(buildServed)]);
