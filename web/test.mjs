// Bundles each test of test/ and runs them with Node's own runner: any Node from 18 on will do.
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as esbuild from "esbuild";

const here = new URL(".", import.meta.url).pathname;
const out = mkdtempSync(join(tmpdir(), "oomph-web-"));
const tests = readdirSync(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
try {
  await esbuild.build({
    entryPoints: tests.map((name) => join(here, "test", name)),
    outdir: out,
    outExtension: { ".js": ".mjs" },
    bundle: true,
    format: "esm",
    platform: "node",
    logLevel: "warning",
  });
  const files = tests.map((name) => join(out, name.replace(".ts", ".mjs")));
  process.exitCode =
    spawnSync(process.execPath, ["--test", ...files], { stdio: "inherit" }).status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
